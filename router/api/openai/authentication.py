"""Authentication of HTTP requests, before anything of their body is read; without keys, of the name they call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.contracts.errors import PermissionDenied, QuireError
from common.process.metrics import is_loopback
from common.untrusted.host_names import is_own_name
from router.answers.text.encoder import works_for
from router.api.openai import errors
from router.contracts.ports import Authenticator
from router.tenants.tenancy import Caller

# Paths for probes and scrapers, which carry no key.
OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version", "/metrics"})


class Authenticated:
    """Middleware that puts the caller into the request's state as `caller`, or answers with 401 or 403.

    A request that the router itself makes has its caller already.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app, self._authenticator = app, authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            state = scope.setdefault("state", {})
            try:
                if "caller" not in state:
                    state["caller"] = self._caller(scope)
            except QuireError as refused:
                await errors.response_to(refused, scope)(scope, receive, send)
                return
            works_for(state["caller"].tenant)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        host = (scope.get("client") or ("",))[0]
        return self._authenticator.caller(_authorization(Headers(scope=scope)), host)


class OwnNames:
    """Middleware that answers with 403 where a caller on this machine calls it by a name that could be anybody's.

    Without keys a page of such a name could read in a browser what this machine serves.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        peer = (scope.get("client") or ("",))[0]
        if host and is_loopback(peer) and not is_own_name(host, self._allowed):
            what = f"Host: {host[:100]!r} could be anybody's name for this machine; call it by its address or localhost"
            refused = PermissionDenied(f"{what}, start the router with --allowed-hosts NAME, or with keys")
            await errors.response_to(refused, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _authorization(headers: Headers) -> str:
    """Return the header of that name; a key in `x-api-key`, as Anthropic's clients send it, counts as one."""
    given, key = headers.get("authorization", ""), headers.get("x-api-key", "")
    return given if given or not key else f"Bearer {key}"
