"""Messages that cannot be decoded, on every kind of handler, with two interceptors around it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest as Request
from opentelemetry.sdk.trace import TracerProvider

from common.contracts.errors import NotFound
from common.rpc.interceptor import MessageCheck, TolerantDecoder
from common.rpc.server import RpcServer, open_channel
from common.telemetry.server_spans import server_spans

GARBAGE = b"\x0a\xff\x01garbage"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo(grpc.GenericRpcHandler):
    """Returns the names that it is sent; the method `refusing` reads nothing, and ends once its message was sent."""

    def __init__(self, sent: asyncio.Event) -> None:
        self._sent = sent

    async def unary_unary(self, request: Request, _: Any) -> bytes:
        return str(request.service).encode()

    async def unary_stream(self, request: Request, _: Any) -> AsyncIterator[bytes]:
        yield request.service.encode()

    async def stream_unary(self, requests: AsyncIterator[Request], _: Any) -> bytes:
        return b",".join([each.service.encode() async for each in requests])

    async def stream_stream(self, requests: AsyncIterator[Request], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.service.encode()

    async def refusing(self, requests: AsyncIterator[Request], _: Any) -> AsyncIterator[bytes]:
        await self._sent.wait()
        raise NotFound("not here")
        yield b""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        make = getattr(grpc, f"{name if name in KINDS else 'stream_stream'}_rpc_method_handler")
        return make(getattr(self, name), request_deserializer=Request.FromString)


@pytest.fixture
def sent() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def channel(sent: asyncio.Event) -> AsyncIterator[Any]:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    rpc = RpcServer([], [server_spans(tracer)])
    rpc.server.add_generic_rpc_handlers([Echo(sent)])
    await rpc.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{rpc.port}") as opened:
        yield opened
    await rpc.stop(0)


async def answers(channel: Any, kind: str, *bodies: bytes) -> list[bytes]:
    """Call a method with raw messages; return its answers."""
    messages = iter(bodies) if kind.startswith("stream") else bodies[0]
    call = getattr(channel, kind)(f"/test.Echo/{kind}")(messages)
    return [each async for each in call] if kind.endswith("stream") else [await call]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_reaches_its_handler_decoded(channel: Any, kind: str) -> None:
    assert await answers(channel, kind, Request(service="a").SerializeToString()) == [b"a"]


@pytest.mark.parametrize("kind", KINDS)
async def test_garbage_is_an_invalid_argument(channel: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        with pytest.raises(aio.AioRpcError, match="message: cannot be decoded") as refused:
            await answers(channel, kind, GARBAGE)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.__dict__["method"] == f"/test.Echo/{kind}"


async def test_a_stream_is_served_up_to_the_garbage(channel: Any) -> None:
    call = channel.stream_stream("/test.Echo/stream_stream")(iter([Request(service="a").SerializeToString(), GARBAGE]))
    assert await call.read() == b"a"
    with pytest.raises(aio.AioRpcError, match="cannot be decoded"):
        await call.read()


async def test_a_handler_may_read_nothing_of_its_stream(channel: Any, sent: asyncio.Event) -> None:
    call = channel.stream_stream("/test.Echo/refusing")()
    await call.write(GARBAGE)  # a write to an ended call makes grpc.aio forget the reason
    sent.set()
    with pytest.raises(aio.AioRpcError, match="not here"):
        await call.read()


# Decodes 12 MB with the memory that the process has now.
FULL = """
import resource
from pathlib import Path
from common.rpc.interceptor import NotDecoded, TolerantDecoder
from quire.inference.v1 import inference_pb2 as pb
body = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=range(3_000_000)))).SerializeToString()
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
decoded = TolerantDecoder(pb.GenerateRequest.FromString)(body)
assert isinstance(decoded, NotDecoded), type(decoded)
"""


def test_a_message_for_which_there_is_no_memory_is_no_mistake_of_its_caller() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [MemoryError(), DecodeError("Error parsing message: Arena alloc failed")])
async def test_its_call_may_be_sent_again(error: Exception) -> None:
    def decode(_: bytes) -> None:
        raise error

    check = MessageCheck("/test.Echo/unary_unary", streamed=False)
    with pytest.raises(MemoryError):
        check.checked(TolerantDecoder(decode)(b""), None)  # type: ignore[arg-type]
