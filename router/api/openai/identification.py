"""The ids of an HTTP request, which every answer carries in its headers, refusals included.

`x-quire-request-id` is the router's own id, different for every request. `x-request-id` is the client's correlation id,
which several requests may share; without one it is the router's id. `x-trace-id` is for `quire trace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.contracts.session_ids import sent_session
from router.requests.request_ids import automatic_id, correlation_id, new_trace_id, recorded_id
from router.requests.validate import valid_traceparent

_TRACE: Final = slice(3, 35)  # of a traceparent


@dataclass(slots=True)
class Ids:
    """`correlation` is empty where the client named none."""

    correlation: str = ""
    traceparent: str = ""
    tracestate: str = ""
    request: str = field(default_factory=automatic_id)
    trace: str = ""
    # The session that the headers or the body name.
    session: str = ""
    # What the body calls the model.
    model: str = ""

    def __post_init__(self) -> None:
        self.trace = self.traceparent[_TRACE] or new_trace_id()

    @staticmethod
    def of(scope: Scope) -> Ids:
        headers = Headers(scope=scope)
        correlation = correlation_id(headers.get("x-request-id", ""))
        traceparent = valid_traceparent(headers.get("traceparent", ""))
        state = ",".join(headers.getlist("tracestate")) if traceparent else ""
        return Ids(correlation, traceparent, state, session=sent_session(headers.get))

    @property
    def recorded(self) -> str:
        """The correlation id for traces and records."""
        return recorded_id(self.correlation)

    def headers(self) -> dict[str, str]:
        return {
            "x-request-id": self.correlation or self.request,
            # Anthropic's clients read this name.
            "request-id": self.correlation or self.request,
            "x-quire-request-id": self.request,
            "x-trace-id": self.trace,
        }


class WithoutPrefix:
    """Middleware that cuts a prefix off the path, where the proxy in front has not."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        await self._app(scope, receive, send)


class Identified:
    """Middleware that puts the ids into the request's state as `ids`, and into the headers of every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ids = scope.setdefault("state", {})["ids"] = Ids.of(scope)

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ids.headers().items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, identified)
