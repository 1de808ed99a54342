"""The router's connection to one worker: a multiplexed stream that is opened again whenever it breaks.

One task writes the stream and one reads it (two concurrent writes end an RPC). A handle names a sequence; its events go
to the sink that was passed to submit. When the stream breaks, every sequence on it is Lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from grpc import aio

from common.backoff import Backoff
from common.errors import ProtocolViolation, QuireError, Unavailable
from common.rpc.server import open_channel
from common.types import FinishReason, PoolIdentity
from common.wire.enum_codec import finish_to_proto
from common.wire.identity_codec import identity_to_proto
from quire.api.status import error_from_rpc
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from router.core.identity import is_complete
from router.core.worker_events import Lost, SequenceEvent, SequenceFinished
from router.core.worker_model import Load
from router.workers.codec import (
    Submission,
    WorkerFacts,
    events_of,
    facts_from_proto,
    load_from_proto,
    refusal_from_proto,
    submit_to_proto,
)

Sink = Callable[[SequenceEvent], None]
_Call = aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]


class WorkerListener(Protocol):
    """Receives events of a worker's connection, on the event loop; must not block."""

    def connected(self, client: WorkerClient, facts: WorkerFacts) -> None:
        """Handle a worker's hello. Raises IdentityMismatch when the worker may not be used."""
        ...

    def heartbeat(self, client: WorkerClient, load: Load) -> None: ...

    def disconnected(self, client: WorkerClient, error: QuireError) -> None:
        """Handle a stream that broke or could not be opened."""
        ...


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """The router's identity for its workers; `incarnation` is random for each process."""

    router_id: str
    incarnation: bytes


RECONNECT = Backoff(first=0.1, longest=1.0, jitter=0.5)


@dataclass(frozen=True, slots=True)
class Pacing:
    """Pauses between attempts to connect, and the seconds that a worker has for its hello.

    A suite is ready at most the longest pause after its slowest worker; an attempt costs well under a millisecond.
    """

    reconnect: Backoff = RECONNECT
    hello: float = 5.0


class WorkerClient:
    """The connection to the worker at one address."""

    def __init__(
        self, address: str, router: RouterIdentity, listener: WorkerListener, pacing: Pacing | None = None
    ) -> None:
        self.address = address
        self._router, self._listener, self._pacing = router, listener, pacing or Pacing()
        self._outbox: asyncio.Queue[pb.StreamRequest] | None = None
        self._sinks: dict[int, Sink] = {}
        # Handles that the router cancelled; later events for them are dropped.
        self._given_up: set[int] = set()
        self._last_handle = 0
        self._last_seq = 0
        # The identity of the pool as known so far; the worker gets it once it is complete.
        self.identity: PoolIdentity | None = None

    # ------------------------------------------------------------ sequences

    @property
    def ready(self) -> bool:
        return self._outbox is not None

    def submit(self, submission: Submission, sink: Sink, fork_of: int | None = None) -> int:
        """Send a sequence and return its handle; its events go to `sink`. Raises Unavailable without a stream."""
        if self._outbox is None:
            raise Unavailable(f"worker at {self.address} is not connected")
        self._last_handle += 1
        handle = self._last_handle
        self._sinks[handle] = sink
        self._outbox.put_nowait(pb.StreamRequest(submit=submit_to_proto(submission, handle, fork_of)))
        return handle

    def cancel(self, handle: int, reason: FinishReason) -> None:
        """Cancel a sequence at the worker; its sink gets no further event. Idempotent."""
        if self._sinks.pop(handle, None) is not None and self._outbox is not None:
            self._tell_to_cancel(handle, reason)

    def _tell_to_cancel(self, handle: int, reason: FinishReason) -> None:
        assert self._outbox is not None
        self._given_up.add(handle)
        cancel = pb.Cancel(handle=handle, reason=finish_to_proto(reason))
        self._outbox.put_nowait(pb.StreamRequest(cancel=cancel))

    def abandon(self, reason: str) -> None:
        """Cancel all sequences at the worker; each sink gets Lost."""
        sinks, self._sinks = self._sinks, {}
        for handle in sinks if self._outbox is not None else ():
            self._tell_to_cancel(handle, FinishReason.CANCELLED)
        for sink in sinks.values():
            sink(Lost(f"{self.address}: {reason}"))

    # ------------------------------------------------------------ the connection

    async def run(self) -> None:
        """Keep the stream open until this task is cancelled, or fails by a bug; sequences are then Lost."""
        failures = 0
        try:
            while True:
                failures = await self._session() or failures + 1
                await asyncio.sleep(self._pacing.reconnect.pause(failures, random.random()))
        finally:
            self._disconnect(Unavailable("the router uses it no longer"))

    async def _session(self) -> int:
        """Open one stream and serve it until it breaks; return 1 when the worker answered, else 0."""
        answered = 0
        try:
            async with open_channel(self.address) as channel:
                call: _Call = rpc.GpuWorkerServiceStub(channel).Stream()
                try:
                    await self._greet(call)
                    answered = 1
                    await self._serve(call)
                finally:
                    call.cancel()
            error: QuireError = Unavailable("the worker closed the stream")
        except aio.AioRpcError as broken:
            error = error_from_rpc(broken)
        except QuireError as refused:
            error = refused
        self._disconnect(error)
        return answered

    async def _greet(self, call: _Call) -> None:
        """Exchange hellos. Raises Unavailable when the worker does not answer, and the listener's errors."""
        known = self.identity if self.identity is not None and is_complete(self.identity) else None
        hello = pb.Hello(
            router_id=self._router.router_id,
            incarnation=self._router.incarnation,
            identity=identity_to_proto(known) if known else None,
        )
        try:
            async with asyncio.timeout(self._pacing.hello):
                with suppress(asyncio.InvalidStateError):  # the call has ended: the read below raises the reason
                    await call.write(pb.StreamRequest(hello=hello))
                answer = await _read(call)
        except TimeoutError:
            raise Unavailable(f"no hello within {self._pacing.hello:g} s") from None
        if answer is None or answer.WhichOneof("message") != "hello":
            raise ProtocolViolation("the worker's first message was no hello")
        self._outbox, self._last_seq = asyncio.Queue(), 0
        self._listener.connected(self, facts_from_proto(answer.hello.info))

    async def _serve(self, call: _Call) -> None:
        assert self._outbox is not None
        writer = asyncio.create_task(_write(call, self._outbox))
        try:
            while (response := await _read(call)) is not None:
                self._receive(response)
        finally:
            writer.cancel()
            # Not `await writer`: that could take this task's own cancellation for the writer's.
            await asyncio.wait({writer})
            if not writer.cancelled():
                writer.result()

    def _receive(self, response: pb.StreamResponse) -> None:
        match response.WhichOneof("message"):
            case "outputs":
                self._take(response.outputs)
            case "heartbeat":
                self._listener.heartbeat(self, load_from_proto(response.heartbeat.load))
            case "refused":
                sink = self._sinks.pop(response.refused.handle, None)
                self._given_up.discard(response.refused.handle)
                if sink is not None:
                    sink(refusal_from_proto(response.refused))
            case other:
                raise ProtocolViolation(f"the worker sent {other or 'an unknown message'}")

    def _take(self, outputs: pb.StepOutputs) -> None:
        if outputs.seq != self._last_seq + 1:
            raise ProtocolViolation(f"outputs {outputs.seq} came after {self._last_seq}")
        self._last_seq = outputs.seq
        for handle, event in events_of(outputs):
            ended = isinstance(event, SequenceFinished)
            sink = self._sinks.pop(handle, None) if ended else self._sinks.get(handle)
            if sink is not None:
                sink(event)
            elif ended:
                self._given_up.discard(handle)
            elif handle not in self._given_up:
                # A leftover of an earlier stream; the sequence has been submitted again since.
                self._tell_to_cancel(handle, FinishReason.CANCELLED)

    def _disconnect(self, error: QuireError) -> None:
        """Inform the listener first: a sink that gets Lost must find this worker gone."""
        self._outbox = None
        self._given_up.clear()
        self._listener.disconnected(self, error)
        self.abandon(str(error))


async def _read(call: _Call) -> pb.StreamResponse | None:
    """Return the next message, None at the end of the stream."""
    response = await call.read()
    return response if isinstance(response, pb.StreamResponse) else None


async def _write(call: _Call, outbox: asyncio.Queue[pb.StreamRequest]) -> None:
    """The one writer of a stream; a broken stream ends it, and the reader gets the error."""
    with suppress(aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.get())
