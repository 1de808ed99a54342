"""Calls whose client goes away at the moment of their end: they end as cancelled, and no error is logged.

gRPC's own client cannot be held at that moment, so the client is a socket that speaks HTTP/2 frame by frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any, Final

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from common.contracts.errors import DeadlineExceeded
from common.rpc.interceptor import AroundInterceptor
from common.rpc.server import RpcServer

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM = _ACK = 1
_END_HEADERS: Final = 4
_CANCEL: Final = struct.pack(">I", 8)
_MARK: Final = b"in order"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(method: str) -> bytes:
    """Return the headers of a call, each literal and not indexed."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "test"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    texts = (bytes([len(text)]) + text.encode() for field in fields.items() for text in field)
    return b"".join(b"\0" + name + value for name, value in zip(texts, texts, strict=True))


class Client:
    """A client of one call over a plain socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60.0)

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str) -> None:
        settings = frame(_SETTINGS, 0, 0, b"")
        asked = frame(_HEADERS, _END_HEADERS, 1, headers(method)) + frame(_DATA, _END_STREAM, 1, bytes(5))
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + asked)

    def cancel(self) -> None:
        """Cancel the call, and return when the server's transport knows that. Blocks the event loop on purpose."""
        self._socket.sendall(frame(_RST_STREAM, 0, 1, _CANCEL) + frame(_PING, 0, 0, _MARK))
        while self._read() != (_PING, _ACK, _MARK):
            pass

    def _read(self) -> tuple[int, int, bytes]:
        head = self._exactly(9)
        return head[3], head[4], self._exactly(int.from_bytes(head[:3], "big"))

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            assert part, "the server closed the connection"
            found += part
        return found


class LosesItsClient(grpc.GenericRpcHandler):
    """Its client cancels each call within the last turn of the handler, before gRPC's event loop can know that."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.serialiser: Any = None

    def _lose(self) -> None:
        assert self.client is not None
        self.client.cancel()

    async def unary(self, request: bytes, context: Any) -> bytes:
        self._lose()
        raise DeadlineExceeded("the deadline has passed")

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        self._lose()
        raise DeadlineExceeded("the deadline has passed")

    async def answer(self, request: bytes, context: Any) -> bytes:
        return b"answer"

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        if name == "stream":
            return grpc.unary_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(getattr(self, name), response_serializer=self.serialiser)


class Left:
    """How the handler of a call was left, as an interceptor outside the errors sees that."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.over = asyncio.Event()

    @asynccontextmanager
    async def around(self, method: str, context: Any) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.over.set()


@asynccontextmanager
async def served(handler: LosesItsClient, left: Left) -> AsyncIterator[RpcServer]:
    rpc = RpcServer([], [AroundInterceptor(left.around)])
    rpc.server.add_generic_rpc_handlers([handler])
    await rpc.start("127.0.0.1", 0)
    try:
        yield rpc
    finally:
        await rpc.stop(0.0)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_deadline_that_passes_as_the_client_goes_is_a_cancelled_call(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler, left = LosesItsClient(), Left()
    async with served(handler, left) as rpc:
        handler.client = Client(rpc.port)
        with closing(handler.client):
            handler.client.call(f"/test/{kind}")
            async with asyncio.timeout(60.0):
                await left.over.wait()
    assert isinstance(left.error, asyncio.CancelledError)
    assert errors_in(caplog) == []


@pytest.mark.parametrize(
    ("text", "logged"),
    [('Failed "execute_batch": (...)', False), ("Failed grpc_call_start_batch: 9 with ... 'INVALID_FLAGS'", True)],
)
async def test_an_answer_that_nobody_takes_is_no_error(
    text: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC sends the last message by itself, and logs a failure that it sees before the end of the call.

    The serialiser fails as that sending does: the order of the two cannot be forced over a socket. A batch that gRPC
    did not even take is a bug, and stays in the log.
    """
    handler, left = LosesItsClient(), Left()

    def fail(_: bytes) -> bytes:
        raise cygrpc.ExecuteBatchError(text)

    handler.serialiser = fail
    async with served(handler, left) as rpc:
        with closing(Client(rpc.port)) as client:
            client.call("/test/answer")
            async with asyncio.timeout(60.0):
                await left.over.wait()
    assert left.error is None
    assert ["ExecuteBatchError" in each for each in errors_in(caplog)] == [True] * logged
