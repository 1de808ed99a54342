"""The stream between the router and one worker, in memory: both queues stand still until an event moves them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from grpc import StatusCode, aio

from quire.gpuworker.v1 import gpuworker_pb2 as pb

# Tells the router's stub that it may call, and nothing else.
Hello = Callable[[], pb.WorkerHello | None]


class MemoryCall:
    """What the router's stub returns for one stream. `to_worker` has what the router has sent and nobody read."""

    def __init__(self, greet: Hello, sent: Callable[[pb.StreamRequest], None]) -> None:
        self._greet, self._sent = greet, sent
        self.to_worker: deque[pb.StreamRequest] = deque()
        self._arrived: deque[pb.StreamResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._broken = ""
        self.open = False

    # ------------------------------------------------------------ the router's end

    def done(self) -> bool:
        return bool(self._broken)

    async def wait_for_connection(self) -> None:
        """It is connected, or reads tell why not."""

    async def write(self, message: pb.StreamRequest) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self._answer(self._greet())
            case "submit" | "cancel":
                self.to_worker.append(message)
                self._sent(message)

    async def read(self) -> pb.StreamResponse:
        while not self._arrived:
            if self._broken:
                raise aio.AioRpcError(StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details=self._broken)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._arrived.popleft()

    async def done_writing(self) -> None: ...

    def cancel(self) -> None:
        """The router has left the stream, or the stream has broken before."""
        self.open = False

    # ------------------------------------------------------------ the worker's end

    def _answer(self, hello: pb.WorkerHello | None) -> None:
        if hello is None:
            self.break_off("Connection refused")
        else:
            self.open = True
            self.deliver(pb.StreamResponse(hello=hello))

    def deliver(self, message: pb.StreamResponse) -> None:
        """Let a message reach the router."""
        self._arrived.append(message)
        self._wake()

    def break_off(self, why: str) -> None:
        """Break the stream: what waits in it is lost."""
        self.open, self._broken = False, why
        self.to_worker.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class MemoryChannel:
    """A channel to one worker; `opened` gets each call."""

    def __init__(self, call: MemoryCall) -> None:
        self._call = call

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def stream_stream(self, *_: Any, **__: Any) -> Callable[[], MemoryCall]:
        return lambda: self._call

    unary_unary = stream_stream


def channel_of(call: MemoryCall) -> aio.Channel:
    return cast("aio.Channel", MemoryChannel(call))
