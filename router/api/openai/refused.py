"""Sees the answers with an error, of which the operator learns: which API and path, by what code, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.openai import errors
from router.api.openai.authentication import OPEN_PATHS
from router.api.openai.identification import Ids
from router.contracts.ports import RefusalWatch
from router.contracts.refusals import Refusal, fault_of_status

# The method of paths that there are not: what a client calls must not become a label.
NO_ROUTE: Final = "unknown"


class RefusalsSeen:
    """Middleware that reports each answer of 400 or more; those to probes are counted alone."""

    def __init__(self, app: ASGIApp, refusals: RefusalWatch) -> None:
        self._app, self._refusals = app, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        since_ns, answered = self._refusals.now_ns(), False

        async def seen(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                if message["status"] >= 400:
                    self._saw(scope, message["status"], since_ns)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except Exception:  # broad: a bug is answered outside of all middleware
            if not answered:
                scope["state"].pop(errors.FAULT, None)
                self._saw(scope, 500, since_ns)
            raise

    def _saw(self, scope: Scope, status: int, since_ns: int) -> None:
        state = scope["state"]
        ids: Ids = state["ids"]
        reason, words = state.get(errors.FAULT) or (_fault_of(scope, status), ())
        caller = state.get("caller")
        refusal = Refusal(
            api=errors.api_of(scope),
            method=route_of(scope),
            code=str(status),
            reason=reason,
            request_id=ids.request,
            client_id=ids.recorded,
            owner="" if caller is None else caller.owner,
            words=words,
        )
        if scope["path"] in OPEN_PATHS:
            self._refusals.count_refusal(refusal)
        else:
            self._refusals.note_refusal(refusal, since_ns)


def _fault_of(scope: Scope, status: int) -> str:
    """Return the reason of an answer that this application has not made: by its server, or to a browser's question."""
    return "PERMISSION_DENIED" if scope["method"] == "OPTIONS" else fault_of_status(status)


def route_of(scope: Scope) -> str:
    """Return the path of a route as the application declares it."""
    matching = (each.path for each in _routes(scope["app"].routes) if each.matches(scope)[0] is not Match.NONE)
    return next(matching, NO_ROUTE)


def _routes(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """Yield the routes with those of included routers, which newer versions of FastAPI keep whole."""
    for each in routes:
        if isinstance(each, Route):
            yield each
        elif included := getattr(each, "original_router", None):
            yield from _routes(included.routes)
