"""One span around each HTTP request, by OpenTelemetry's conventions; the spans of its inferences hang below it.

It has no text of the client but the path and the name that it calls the server by. Probes have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.telemetry import context_from, traceparent_of
from common.telemetry.conventions import ERROR_TYPE
from router.api.openai.authentication import OPEN_PATHS
from router.api.openai.identification import Ids
from router.api.openai.refused import NO_ROUTE, route_of
from router.observe.sampling import beginning

# A method that the conventions do not know would be a name that a client chose.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})


class HttpSpans:
    """Middleware inside of `Identified`, whose trace it begins. An answer of 500 or more is an error of this server."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)
        recording, answered = span.is_recording(), False

        async def seen(message: Message) -> None:
            nonlocal answered
            if recording and message["type"] == "http.response.start":
                answered = True
                _answered(span, message["status"])
            await send(message)

        token = otel_context.attach(set_span_in_context(span))
        try:
            await self._app(scope, receive, seen if recording else send)
        except Exception as error:  # broad: a bug is answered outside of all middleware
            if not answered:
                _answered(span, 500, type(error).__qualname__)
            raise
        finally:
            otel_context.detach(token)
            if recording:
                _name(span, scope)
                span.end()

    def _begin(self, scope: Scope) -> Span:
        ids: Ids = scope["state"]["ids"]
        with beginning(ids.trace):
            parent = context_from(ids.traceparent, ids.tracestate)
            span = self._tracer.start_span(_method(scope), parent, SpanKind.SERVER)
        ids.traceparent = traceparent_of(set_span_in_context(span))
        if span.is_recording():
            span.set_attributes(_asked(scope))
        return span


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "HTTP"


def _asked(scope: Scope) -> Mapping[str, str | int]:
    """Return what is known of a request before it is answered."""
    method = _method(scope)
    found: dict[str, str | int] = {
        "http.request.method": "_OTHER" if method == "HTTP" else method,
        "url.path": scope["raw_path"].decode("latin-1"),
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    host, port = _server(scope)
    found |= {"server.address": host} if host else {}
    return found | ({"server.port": port} if port else {})


def _server(scope: Scope) -> tuple[str, int]:
    """Return how the client names this server, else the address that it listens on."""
    try:
        named = urlsplit(f"//{Headers(scope=scope).get('host', '')}")
        if named.hostname:
            return named.hostname, named.port or 0
    except ValueError:
        pass
    host, port = scope.get("server") or ("", 0)
    return host, port or 0


def _answered(span: Span, status: int, error: str = "") -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute(ERROR_TYPE, error or str(status))
        span.set_status(Status(StatusCode.ERROR))


def _name(span: Span, scope: Scope) -> None:
    """Name a span by its route, as the application declares it; paths that there are not have none."""
    # The framework leaves the route that it took; a request that was answered before has to be looked for.
    taken = getattr(scope.get("route"), "path", None)
    if (route := taken or route_of(scope)) != NO_ROUTE:
        span.set_attribute("http.route", route)
        span.update_name(f"{_method(scope)} {route}")
