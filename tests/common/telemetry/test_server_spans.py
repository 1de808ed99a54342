"""Spans of a server over a real socket: parent, status, and the right end for RPCs that were cancelled or expired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from common.contracts.errors import NotFound
from common.rpc.server import RpcServer, open_channel
from common.settings.options import ServiceSettings
from common.telemetry import traceparent_of
from common.telemetry.provider import setup
from common.telemetry.server_spans import server_spans
from common.telemetry.spans import RecordedSpan
from tests.support.deadlines import TooSlow, with_enough_time

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Channel = Any


class Collected:
    """Hands each span that ends to whoever waits for it."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[RecordedSpan] = asyncio.Queue()

    async def next(self) -> RecordedSpan:
        async with asyncio.timeout(60.0):
            return await self.ended.get()


class Handlers(grpc.GenericRpcHandler):
    """A method of each form that matters to spans."""

    def __init__(self) -> None:
        self.seen = ""

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.seen = traceparent_of()
        return b"done"

    async def missing(self, request: bytes, context: Any) -> bytes:
        raise NotFound("nobody knows it")

    async def buggy(self, request: bytes, context: Any) -> bytes:
        raise ZeroDivisionError

    async def writing(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        if request == b"wait":
            await asyncio.get_running_loop().create_future()

    async def yielding(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        if request == b"wait":
            await asyncio.get_running_loop().create_future()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        streams = name in ("writing", "yielding")
        make: Callable[..., Any] = (
            grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        )
        return make(getattr(self, name)) if hasattr(self, name) else None


@pytest.fixture
def spans() -> Collected:
    return Collected()


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def channel(spans: Collected, handlers: Handlers) -> AsyncIterator[Channel]:
    telemetry = setup("test", ServiceSettings(), spans.ended.put_nowait, {})
    rpc = RpcServer([], [server_spans(telemetry.tracer, untraced=["/test.Handlers/quiet"])])
    rpc.server.add_generic_rpc_handlers([handlers])
    await rpc.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{rpc.port}") as opened:
        yield opened
    await rpc.stop(0)


def outcome(span: RecordedSpan) -> tuple[object, StatusCode, str | None]:
    assert span.attributes.get("error.type") == span.status.description
    return span.attributes["rpc.response.status_code"], span.status.status_code, span.status.description


async def test_an_rpc_is_a_child_of_its_clients_span_and_parent_of_what_its_handler_starts(
    channel: Channel, spans: Collected, handlers: Handlers
) -> None:
    await channel.unary_unary("/test.Handlers/unary")(b"", metadata=(("traceparent", SAMPLED),))
    span = await spans.next()
    assert (span.name, span.kind) == ("test.Handlers/unary", SpanKind.SERVER)
    assert (span.attributes["rpc.system.name"], span.attributes["rpc.method"]) == ("grpc", "test.Handlers/unary")
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert handlers.seen.split("-")[2] == f"{span.context.span_id:016x}"
    assert outcome(span) == ("OK", StatusCode.UNSET, None)


async def test_the_span_of_an_rpc_has_its_clients_trace_state(channel: Channel, spans: Collected) -> None:
    metadata = (("traceparent", SAMPLED), ("tracestate", "vendor=a:1"))
    await channel.unary_unary("/test.Handlers/unary")(b"", metadata=metadata)
    assert b"vendor=a:1" in (await spans.next()).encoded()


async def test_without_a_traceparent_a_trace_begins_here(channel: Channel, spans: Collected) -> None:
    await channel.unary_unary("/test.Handlers/unary")(b"")
    assert (await spans.next()).parent is None


@pytest.mark.parametrize(
    ("method", "expected"),
    [("missing", ("NOT_FOUND", StatusCode.UNSET, None)), ("buggy", ("INTERNAL", StatusCode.ERROR, "INTERNAL"))],
)
async def test_a_failed_rpc_has_the_status_that_the_client_saw_and_an_error_where_the_server_is_at_fault(
    channel: Channel, spans: Collected, method: str, expected: tuple[object, StatusCode, str | None]
) -> None:
    with pytest.raises(aio.AioRpcError):
        await channel.unary_unary(f"/test.Handlers/{method}")(b"")
    assert outcome(await spans.next()) == expected


@pytest.mark.parametrize("method", ["writing", "yielding"])
async def test_a_stream_that_ends_well_is_ok(channel: Channel, spans: Collected, method: str) -> None:
    assert [each async for each in channel.unary_stream(f"/test.Handlers/{method}")(b"")] == [b"first"]
    assert outcome(await spans.next()) == ("OK", StatusCode.UNSET, None)


@pytest.mark.parametrize("method", ["writing", "yielding"])
async def test_a_cancelled_stream_says_so(channel: Channel, spans: Collected, method: str) -> None:
    stream = channel.unary_stream(f"/test.Handlers/{method}")(b"wait", timeout=60)
    await stream.read()
    stream.cancel()
    assert outcome(await spans.next()) == ("CANCELLED", StatusCode.UNSET, None)


async def read_all(stream: Any, seen: list[bytes]) -> None:
    """Read a stream to its end, whatever that is; keep what came."""
    async for each in stream:
        seen.append(each)  # noqa: PERF401 - kept when the next one raises


@pytest.mark.parametrize("method", ["writing", "yielding"])
async def test_an_expired_stream_says_so(channel: Channel, spans: Collected, method: str) -> None:
    async def attempt(seconds: float) -> None:
        seen: list[bytes] = []
        stream = channel.unary_stream(f"/test.Handlers/{method}")(b"wait", timeout=seconds)
        with pytest.raises(aio.AioRpcError):
            await read_all(stream, seen)
        if not seen:
            raise TooSlow
        assert outcome(await spans.next()) == ("DEADLINE_EXCEEDED", StatusCode.ERROR, "DEADLINE_EXCEEDED")

    await with_enough_time(attempt, 0.3)


async def test_a_client_that_goes_away_without_deadline_counts_as_cancelled(channel: Channel, spans: Collected) -> None:
    stream = channel.unary_stream("/test.Handlers/yielding")(b"wait")
    await stream.read()
    stream.cancel()
    assert outcome(await spans.next()) == ("CANCELLED", StatusCode.UNSET, None)


async def test_health_checks_are_not_traced(channel: Channel, spans: Collected) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await channel.unary_unary("/test.Handlers/unary")(b"")
    assert (await spans.next()).name == "test.Handlers/unary"
    assert trace.get_current_span() is trace.INVALID_SPAN
