"""One span around each RPC that a server handles, ended with the status that the RPC really had.

gRPC's contributed instrumentation is not used: it breaks on handlers that call `write`, and leaves the spans of
cancelled and expired RPCs without a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

import grpc
from grpc import aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer

from common.rpc.deadline import is_expiry
from common.rpc.interceptor import AroundInterceptor, Context
from common.telemetry.context import context_from
from common.telemetry.conventions import SERVER_FAULTS, fail_span

# Services with constant traffic, or that carry spans themselves.
_UNTRACED: Final = ("/grpc.", "/opentelemetry.")
_BY_NUMBER: Final = {each.value[0]: each for each in grpc.StatusCode}


def server_spans(tracer: Tracer, untraced: Collection[str] = ()) -> aio.ServerInterceptor:
    """Return the interceptor that makes a server's spans; put it before the others.

    `untraced` are full method names (`/quire.kvmanager.v1.KvManagerService/Session`): streams that live as long as the
    process, whose requests carry their trace context inside the messages. The span is the current one in its handler.
    """

    def around(method: str, context: Context) -> AbstractAsyncContextManager[object]:
        if method in untraced or method.startswith(_UNTRACED):
            return _Untraced()
        return _ServerSpan(tracer, method, context)

    return AroundInterceptor(around)


class _Untraced:
    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        return None


class _ServerSpan:
    """The span of one RPC, a child of the traceparent in its metadata."""

    def __init__(self, tracer: Tracer, method: str, context: Context) -> None:
        self._tracer, self._method, self._context = tracer, method, context
        self._span: Span = trace.INVALID_SPAN
        # None without a deadline, whatever the type stubs say.
        self._timeout: float | None = context.time_remaining()

    async def __aenter__(self) -> Span:
        metadata = dict(self._context.invocation_metadata() or ())
        method = self._method.lstrip("/")
        self._span = self._tracer.start_span(
            method,
            context=context_from(str(metadata.get("traceparent", "")), str(metadata.get("tracestate", ""))),
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
        )
        # Never detached: gRPC runs each handler in a task of its own, and the task's context ends with it.
        otel_context.attach(trace.set_span_in_context(self._span))
        return self._span

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None
    ) -> None:
        code = ended_with(self._context, error, self._timeout)
        self._span.set_attribute("rpc.response.status_code", code.name)
        if code in SERVER_FAULTS:
            fail_span(self._span, code, code.name)
        self._span.end()


def ended_with(context: Context, error: BaseException | None, timeout: float | None) -> grpc.StatusCode:
    """Return the status of an RPC whose handler was left with `error`; it had `timeout` seconds."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        expired = timeout is not None and is_expiry(timeout, context.time_remaining())
        return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
    code = context.code()
    # A handler that raised ends with the code that its context has, if any.
    if error is not None and not isinstance(error, aio.AbortError) and not code:
        return grpc.StatusCode.UNKNOWN
    return code if isinstance(code, grpc.StatusCode) else _BY_NUMBER[code or 0]
