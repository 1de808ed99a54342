"""Authentication of HTTP requests, before anything of their body is read."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import QuireError
from router.openai import errors
from router.ports import Authenticator

# Paths for probes and scrapers, which carry no key.
OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version"})


class Authenticated:
    """Middleware that puts the caller into the request's state as `caller`, or answers with 401 or 403."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app, self._authenticator = app, authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                host = (scope.get("client") or ("",))[0]
                caller = self._authenticator.caller(_authorization(Headers(scope=scope)), host)
            except QuireError as refused:
                await errors.response_to(refused, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _authorization(headers: Headers) -> str:
    """Return the header of that name; a key in `x-api-key`, as Anthropic's clients send it, counts as one."""
    given, key = headers.get("authorization", ""), headers.get("x-api-key", "")
    return given if given or not key else f"Bearer {key}"
