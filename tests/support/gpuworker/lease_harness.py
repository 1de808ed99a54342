"""A lease client against a manager that a test scripts message by message, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpc import aio

from common.contracts.lease import Attach, Attached, AttachOk, AttachRejected, Connected, Inventory, LeaseEvent, Report
from common.contracts.types import KvGeometry, PoolIdentity
from common.wire.lease_codec import attach_ok_to_proto
from gpuworker.engine.lease_client import LeaseClient
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

IDENTITY = PoolIdentity("m", "t", 16, KvGeometry(1, 1, 8, 8, "float32"))
EMPTY = Inventory()
TIMEOUT_S = 120.0
_T = TypeVar("_T")


def attach(session: int, epoch_seen: int = 0) -> Attach:
    return Attach("w", b"incarnation".ljust(16), session, epoch_seen, IDENTITY, 8, "127.0.0.1:1")


@dataclass
class Stream:
    """One stream at the scripted manager."""

    requests: asyncio.Queue[kvmanager_pb2.SessionRequest] = field(default_factory=asyncio.Queue)
    responses: asyncio.Queue[kvmanager_pb2.SessionResponse | None] = field(default_factory=asyncio.Queue)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0

    async def next(self) -> kvmanager_pb2.SessionRequest:
        request: kvmanager_pb2.SessionRequest = await soon(self.requests.get())
        return request

    def say(self, session: int, **message: Any) -> None:
        self.sent += 1
        self.responses.put_nowait(kvmanager_pb2.SessionResponse(session=session, seq=self.sent, **message))

    def end(self) -> None:
        """End the stream from the manager's side."""
        self.responses.put_nowait(None)

    async def accept(self, epoch: int = 1, silence: float = 0.0) -> kvmanager_pb2.SessionRequest:
        """Take an Attach with an inventory of one chunk and accept it; return the Attach."""
        request = await self.next()
        assert (await self.next()).inventory.last
        message = attach_ok_to_proto(AttachOk(epoch, 4))
        message.silence_seconds = silence
        self.say(request.session, attach_ok=message)
        return request


class ScriptedManager(kvmanager_pb2_grpc.KvManagerServiceServicer):
    """Hands every stream that is opened to the test."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        stream = Stream()
        await context.send_initial_metadata(())
        self.streams.put_nowait(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (response := await stream.responses.get()) is not None:
                await context.write(response)
        finally:
            reader.cancel()
            stream.closed.set()

    async def _read(self, requests: AsyncIterator[Any], stream: Stream) -> None:
        async for request in requests:
            stream.requests.put_nowait(request)

    async def Lookup(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetBlockTable(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetPool(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetBlockMap(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetBlock(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def SubscribeKvEvents(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def PinPrefix(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ListPins(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def PrefetchPrefix(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def UnpinPrefix(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def WatchLeader(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


async def soon(awaitable: Any) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await awaitable


class Rig:
    """A manager, a client, and the engine's thread played by the test (each call crosses from another thread)."""

    def __init__(self) -> None:
        self.manager = ScriptedManager()
        self.server = aio.server()
        kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(self.manager, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.arrived = asyncio.Event()
        self.refused: list[AttachRejected] = []
        self.round_trips: list[float] = []
        self.client = LeaseClient(
            [f"127.0.0.1:{self.port}"],
            self.arrived.set,
            self.refused.append,
            random.Random(1),
        )
        self.client.on_round_trip = self.round_trips.append
        self.events: list[LeaseEvent] = []

    async def stream(self) -> Stream:
        stream: Stream = await soon(self.manager.streams.get())
        return stream

    async def event(self, kind: type[_T]) -> _T:
        """Return the next event, which must be of the kind."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.events:
                await self.arrived.wait()
                self.arrived.clear()
                self.events += await asyncio.to_thread(self.client.poll)
        event = self.events.pop(0)
        assert isinstance(event, kind), event
        return event

    async def attach(self, session: int, inventory: Inventory = EMPTY, epoch_seen: int = 0) -> None:
        await asyncio.to_thread(self.client.attach, attach(session, epoch_seen), inventory)

    async def send(self, session: int, report: Report) -> None:
        await asyncio.to_thread(self.client.send_report, session, report)

    async def session(self, session: int, silence: float = 0.0) -> Stream:
        """Open a session, up to Attached, and with `silence` up to the first pulse."""
        await self.event(Connected)
        stream = await self.stream()
        await self.attach(session)
        await stream.accept(silence=silence)
        assert await self.event(Attached) == Attached(session, AttachOk(1, 4))
        if silence:
            assert (await stream.next()).HasField("pulse")
        return stream
