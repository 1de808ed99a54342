"""The router's connection to one worker: a multiplexed stream that is opened again whenever it breaks.

One task writes the stream and one reads it (two concurrent writes end an RPC). A handle names a sequence; its events go
to the sink that was passed to `submit_sequence`. When the stream breaks, every sequence on it is Lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from grpc import StatusCode, aio

from common.backoff import Backoff
from common.contracts.adapters import NOBODYS, AdapterRef, AdapterShare
from common.contracts.errors import FieldViolation, InvalidRequest, ProtocolViolation, QuireError, Unavailable
from common.contracts.limits import MAX_HANDLE
from common.contracts.types import FinishReason, PoolIdentity
from common.rpc import stream_writes
from common.rpc.server import Dial, open_channel
from common.wire.enum_codec import finish_to_proto
from common.wire.identity_codec import identity_to_proto
from quire.api.status import DETAILS_KEY, code_from_rpc, error_from_rpc
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from router.contracts.identity import is_complete
from router.placement.adapters import WorkerAdapters
from router.placement.worker_model import Load
from router.workers.codec import (
    Submission,
    WorkerFacts,
    adapters_from_proto,
    error_of_status,
    events_of,
    facts_from_proto,
    load_from_proto,
    refusal_from_proto,
    submit_to_proto,
)
from router.workers.in_flight import InFlight, Sink
from router.workers.orphan_queries import FoundOrphans, OrphanQueries
from router.workers.outbox import Outbox
from router.workers.suspicion import Breakdown
from router.workers.worker_events import Lost, Refused, SequenceEvent, SequenceFinished

WorkerCall = aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]


# Reads and writes of a call to a worker, and what its errors mean.
def is_refused(error: aio.AioRpcError) -> bool:
    """Return whether a call failed because no process listens at its address: a worker there has ended."""
    return "Connection refused" in (error.details() or "")


def found_silent(error: aio.AioRpcError) -> bool:
    """Return whether a worker ended a stream because nothing came from this router: no request is to blame."""
    return error.code() is StatusCode.DEADLINE_EXCEEDED


async def read(call: WorkerCall) -> pb.StreamResponse | None:
    """Return the next message, None at the end of the stream."""
    response = await call.read()
    return response if isinstance(response, pb.StreamResponse) else None


async def write(call: WorkerCall, outbox: Outbox) -> None:
    """The one writer of a stream; the end of the stream ends it, and the reader gets the reason."""
    while (message := await outbox.take()) is not None:
        if not await stream_writes.write(call, message):
            return
    await call.done_writing()


# Adoptions that a worker has not answered yet.
class Confirmations:
    """Futures by the handle of the sequence that is to be adopted."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[None]] = {}

    def expect(self, handle: int) -> asyncio.Future[None]:
        answer = self._open[handle] = asyncio.get_running_loop().create_future()
        return answer

    def settle(self, handle: int, error: QuireError | None = None) -> None:
        """Answer, with success or an error. A handle that none expects is ignored."""
        answer = self._open.pop(handle, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
            answer.exception()  # whoever waited may have left


# Loads and unloads of adapters that a worker has not answered yet.
class AdapterQueries:
    """Futures by the number of a question."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[None]] = {}

    def ask(self) -> tuple[int, asyncio.Future[None]]:
        """Return the number of a question, and the future of its answer, which fails when the stream breaks."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = answer
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        return number, answer

    def answered(self, number: int, error: QuireError | None) -> None:
        answer = self._open.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
            answer.exception()  # whoever asked may have left

    def lose(self, error: QuireError) -> None:
        """Fail all: the stream has broken."""
        for number in list(self._open):
            self.answered(number, Unavailable(str(error)))


# Breaks of one worker's connection of which it is not known yet whether the worker's process ended.
def is_severed(error: aio.AioRpcError) -> bool:
    """Return whether a connection broke under a call: a worker that ends a call itself says why."""
    said = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return code_from_rpc(error) is StatusCode.UNAVAILABLE and not said


class OpenBreaks:
    """Settles each break by the next handshake: the same process answers, another one, or nothing listens."""

    def __init__(self) -> None:
        self._incarnation = b""
        self._open: list[Breakdown] = []

    def add(self, breakdown: Breakdown) -> None:
        if not breakdown.settled:
            self._open.append(breakdown)

    def greeted(self, incarnation: bytes) -> None:
        """Note which process answers now."""
        self._settle(lives=incarnation == self._incarnation)
        self._incarnation = incarnation

    def gone(self) -> None:
        """Note that the process has ended, or that it is asked no more."""
        self._settle(lives=False)

    def _settle(self, lives: bool) -> None:
        settled, self._open = self._open, []
        for each in settled:
            each.settle(lives)


log = logging.getLogger(__name__)


class WorkerListener(Protocol):
    """Receives events of a worker's connection, on the event loop; must not block."""

    def connected(self, client: WorkerClient, facts: WorkerFacts) -> None:
        """Handle a worker's hello. Raises IdentityMismatch when the worker may not be used."""
        ...

    def heartbeat(self, client: WorkerClient, load: Load) -> None: ...

    def adapters_changed(self, client: WorkerClient, adapters: WorkerAdapters) -> None:
        """Handle what a worker knows of adapters: after its hello, and whenever it changes."""
        ...

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
    `stood_still` is the pause of a router that runs again, before it goes on with what a worker has taken from it.
    Clients that left meanwhile go on at other routers. Their ends must be read first, or this router would take their
    sequences back, and end them then.
    """

    reconnect: Backoff = RECONNECT
    hello: float = 5.0
    stood_still: float = 1.0


class WorkerClient:
    """The connection to the worker at one address."""

    def __init__(
        self,
        address: str,
        router: RouterIdentity,
        listener: WorkerListener,
        pacing: Pacing | None = None,
        dial: Dial = open_channel,
    ) -> None:
        self.address, self._dial = address, dial
        self._router, self._listener, self._pacing = router, listener, pacing or Pacing()
        self._outbox: Outbox | None = None
        self._in_flight: dict[int, InFlight] = {}
        # Handles that the router cancelled; later events for them are dropped.
        self._given_up: set[int] = set()
        self._queries, self._adapter_queries = OrphanQueries(), AdapterQueries()
        self._last_handle = 0
        self._last_seq = 0
        self._beats = 0
        # Whether the worker has said that it ends: the end of its stream is then no failure.
        self._draining = False
        # Whether this router stood still since the last hello.
        self._stood_still = False
        self._connection = secrets.randbits(63) + 1
        self._leaving = False
        self._confirmations, self._breaks = Confirmations(), OpenBreaks()
        self.refused = False
        """Whether the latest attempt to connect found no process at the address."""
        # The identity of the pool as known so far; the worker gets it once it is complete.
        self.identity: PoolIdentity | None = None

    # ------------------------------------------------------------ sequences

    @property
    def ready(self) -> bool:
        return self._outbox is not None

    def submit_sequence(self, submission: Submission, sink: Sink, fork_of: int | None = None) -> int:
        """Send a sequence and return its handle; its events go to `sink`.

        Raises Unavailable without a stream, InvalidRequest for a submission that is too large for it, and Overloaded
        when the worker does not read.
        """
        if self._outbox is None:
            raise Unavailable(f"worker at {self.address} is not connected")
        handle = self._next_handle()
        self._outbox.submit(pb.StreamRequest(submit=submit_to_proto(submission, handle, fork_of)))
        self._in_flight[handle] = InFlight(sink, self._beats)
        self._last_handle = handle
        return handle

    def find_request(self, request_id: str, tenant: str) -> asyncio.Future[FoundOrphans]:
        """Ask for the orphans of a tenant's request. Raises Unavailable without a stream; so does the future."""
        if self._outbox is None:
            raise Unavailable(f"worker at {self.address} is not connected")
        question, answer = self._queries.ask(request_id, tenant)
        self._outbox.put(pb.StreamRequest(find=question))
        return answer

    def load_adapter(
        self, wanted: AdapterRef, path: str = "", share: AdapterShare = NOBODYS, folder: str = ""
    ) -> asyncio.Future[None]:
        """Have the worker load an adapter for a tenant; the future ends when it is in memory.

        With a path it is the one there, below that folder of the worker's --lora-dir; "": anywhere below --lora-dir.

        Raises Unavailable without a stream; so does the future, and with the worker's reason.
        """
        number, answer, outbox = self._ask_of_adapter()
        load = pb.LoadAdapter(query=number, name=wanted.name, path=path, fingerprint=wanted.fingerprint, folder=folder)
        load.share.MergeFrom(pb.AdapterShare(tenant=share.tenant, names=share.names, max_bytes=share.max_bytes))
        outbox.put(pb.StreamRequest(load_adapter=load))
        return answer

    def unload_adapter(self, name: str) -> asyncio.Future[None]:
        """Have the worker forget an adapter. Raises as `load_adapter` does."""
        number, answer, outbox = self._ask_of_adapter()
        outbox.put(pb.StreamRequest(unload_adapter=pb.UnloadAdapter(query=number, name=name)))
        return answer

    def _ask_of_adapter(self) -> tuple[int, asyncio.Future[None], Outbox]:
        if self._outbox is None:
            raise Unavailable(f"worker at {self.address} is not connected")
        return *self._adapter_queries.ask(), self._outbox

    def adopt(self, sequence: int, sink: Sink, timeout: float | None = None) -> tuple[int, asyncio.Future[None]]:
        """Go on with an orphan; all its events so far come to `sink` again, then the others.

        Return its handle, and a future that is done when the orphan is this router's, and fails when it is another
        one's. Raises Unavailable without a stream. The deadline is in `timeout` seconds.
        """
        if self._outbox is None:
            raise Unavailable(f"worker at {self.address} is not connected")
        handle = self._next_handle()
        self._outbox.put(pb.StreamRequest(adopt=pb.Adopt(handle=handle, sequence=sequence, timeout_seconds=timeout)))
        self._in_flight[handle] = InFlight(sink, self._beats)
        self._last_handle = handle
        return handle, self._confirmations.expect(handle)

    def acknowledge(self, handle: int) -> None:
        """Let the worker forget a sequence that has ended: it has left the router, or another worker has it."""
        if self._outbox is not None:
            self._outbox.acknowledge(handle)

    def _next_handle(self) -> int:
        """Return the next handle that names no sequence; after the last one that fits the wire comes 1 again."""
        handle = self._last_handle % MAX_HANDLE + 1
        while handle in self._in_flight or handle in self._given_up:
            handle = handle % MAX_HANDLE + 1
        return handle

    def cancel_sequence(self, handle: int, reason: FinishReason) -> None:
        """Cancel a sequence at the worker; its sink gets no further event. Idempotent."""
        if self._in_flight.pop(handle, None) is not None and self._outbox is not None:
            self._confirmations.settle(handle, Unavailable("the sequence was cancelled before the worker gave it"))
            self._tell_to_cancel(handle, reason)

    def heard_at(self, handle: int) -> float:
        """Return when something of a sequence came last, or when it was submitted; 0 for one that has left."""
        found = self._in_flight.get(handle)
        return 0.0 if found is None else found.heard_at

    def take_back(self, handle: int, reason: str) -> None:
        """Cancel a sequence that is to go on elsewhere; its sink gets all that it put out, then its end. Idempotent.

        A sequence that was not sent yet is Lost with the reason.
        """
        if handle in self._in_flight and self._outbox is not None:
            cancel = pb.Cancel(handle=handle, reason=finish_to_proto(FinishReason.CANCELLED), hands_over=True)
            if not self._outbox.cancel(pb.StreamRequest(cancel=cancel)):
                self._give(handle, self._in_flight.pop(handle), Lost(reason))

    def _tell_to_cancel(self, handle: int, reason: FinishReason) -> None:
        assert self._outbox is not None
        cancel = pb.Cancel(handle=handle, reason=finish_to_proto(reason))
        if self._outbox.cancel(pb.StreamRequest(cancel=cancel)):
            self._given_up.add(handle)

    def abandon(self, reason: str, broken: bool = True, severed: bool = False) -> None:
        """Cancel all sequences at the worker; each sink gets Lost. `broken` says that a sequence may be the cause.

        `severed`: the connection broke, so that the worker may live.
        """
        lost, self._in_flight = self._in_flight, {}
        self._abandon(lost, reason, broken, severed)

    def abandon_silent(self, seconds: float, reason: str) -> None:
        """Cancel the sequences of which nothing has come for so many seconds; each sink gets Lost."""
        latest = time.monotonic() - seconds
        lost = {handle: each for handle, each in self._in_flight.items() if each.heard_at <= latest}
        for handle in lost:
            del self._in_flight[handle]
        self._abandon(lost, reason, broken=False)

    def _abandon(self, lost: dict[int, InFlight], reason: str, broken: bool, severed: bool = False) -> None:
        for handle in lost if self._outbox is not None else ():
            self._tell_to_cancel(handle, FinishReason.CANCELLED)
        breakdown = Breakdown(unsettled=broken and severed and bool(lost))
        self._breaks.add(breakdown)
        for handle, each in lost.items():
            self._confirmations.settle(handle, Unavailable(f"{self.address}: {reason}"))
            begun = broken and each.begun(self._beats)
            self._give(handle, each, Lost(f"{self.address}: {reason}", breakdown if begun else None))

    def _give(self, handle: int, to: InFlight, event: SequenceEvent) -> None:
        """Hand an event to its sink. A sink that fails loses its own sequence alone."""
        try:
            to.sink(event)
        # Broad: an exception would break the stream for all sequences of the worker.
        except Exception:
            log.exception("unexpected error in the sink of a sequence at %s", self.address)
            self.cancel_sequence(handle, FinishReason.CANCELLED)
            with suppress(Exception):
                to.sink(Lost("internal error; the router's log has the details"))

    # ------------------------------------------------------------ the connection

    def leave(self) -> None:
        """Send what waits, then end the stream: `run` returns when the worker has read all of it."""
        self._leaving = True
        if self._outbox is not None:
            self._outbox.close()

    async def run(self) -> None:
        """Keep the stream open until `leave` or a cancellation ends this task, or a bug; sequences are then Lost."""
        failures, broken = 0, True
        try:
            while not self._leaving:
                failures = await self._session() or failures + 1
                if self._leaving:
                    return
                await asyncio.sleep(self._pacing.reconnect.pause(failures, random.random()))
        except asyncio.CancelledError:
            broken = False
            raise
        finally:
            self._disconnect(Unavailable("the router uses it no longer"), broken)
            self._breaks.gone()

    async def _session(self) -> int:
        """Open one stream and serve it until it breaks; return 1 when the worker answered, else 0."""
        answered, broken, severed = 0, True, False
        try:
            async with self._dial(self.address) as channel:
                call: WorkerCall = rpc.GpuWorkerServiceStub(channel).Stream()
                try:
                    await self._greet(call)
                    answered = 1
                    await self._serve(call)
                finally:
                    call.cancel()
            error: QuireError = Unavailable("the worker closed the stream")
            broken = not self._draining and not self._leaving
        except aio.AioRpcError as failed:
            error = error_from_rpc(failed)
            self.refused, severed = is_refused(failed), is_severed(failed)
            if found_silent(failed) or (self._outbox is not None and self._outbox.stood_still):
                self._stood_still, broken = True, False
                await asyncio.sleep(self._pacing.stood_still)
        except QuireError as refused:
            error = refused
        self._disconnect(error, broken, severed)
        if self.refused:
            self._breaks.gone()
        return answered

    async def _greet(self, call: WorkerCall) -> None:
        """Exchange hellos. Raises Unavailable when the worker does not answer, and the listener's errors."""
        known = self.identity if self.identity is not None and is_complete(self.identity) else None
        hello = pb.Hello(
            router_id=self._router.router_id,
            incarnation=self._router.incarnation,
            identity=identity_to_proto(known) if known else None,
            connection=self._connection,
            stood_still=self._stood_still,
        )
        try:
            async with asyncio.timeout(self._pacing.hello):
                await stream_writes.write(call, pb.StreamRequest(hello=hello))
                answer = await read(call)
        except TimeoutError:
            self.refused = False
            raise Unavailable(f"no hello within {self._pacing.hello:g} s") from None
        if answer is None or answer.WhichOneof("message") != "hello":
            raise ProtocolViolation("the worker's first message must be Hello")
        self._outbox = Outbox(answer.hello.silence_seconds)
        self._last_seq, self._draining, self.refused, self._stood_still = 0, False, False, False
        facts = facts_from_proto(answer.hello.info)
        self._breaks.greeted(facts.incarnation)
        self._listener.connected(self, facts)

    async def _serve(self, call: WorkerCall) -> None:
        assert self._outbox is not None
        writer = asyncio.create_task(write(call, self._outbox))
        try:
            while (response := await read(call)) is not None:
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
                self._beats += 1
                self._draining = response.heartbeat.load.draining
                self._listener.heartbeat(self, load_from_proto(response.heartbeat.load))
            case "adapters":
                self._listener.adapters_changed(self, adapters_from_proto(response.adapters))
            case "adapter_answer":
                answer = response.adapter_answer
                refused_because = error_of_status(answer.status) if answer.status else None
                self._adapter_queries.answered(answer.query, refused_because)
            case "found":
                self._queries.answered(response.found)
            case "adopted":
                self._confirmations.settle(response.adopted.handle)
            case "refused":
                # Decoded first: if that fails, the sequence is still in flight, and is Lost with the stream.
                handle, refusal = response.refused.handle, refusal_from_proto(response.refused)
                refused = self._in_flight.pop(handle, None)
                self._given_up.discard(handle)
                self._confirmations.settle(handle, refusal.error)
                if refused is not None:
                    self._give(handle, refused, refusal)
            case other:
                raise ProtocolViolation(f"the worker sent {other or 'an unknown message'}")

    def _take(self, outputs: pb.StepOutputs) -> None:
        if outputs.seq != self._last_seq + 1:
            raise ProtocolViolation(f"outputs {outputs.seq} came after {self._last_seq}")
        self._last_seq = outputs.seq
        failed, now = Breakdown(), time.monotonic()
        for handle, event in events_of(outputs):
            ended = isinstance(event, SequenceFinished)
            to = self._in_flight.pop(handle, None) if ended else self._in_flight.get(handle)
            if to is not None:
                to.heard_at = now
                if not to.sampled:
                    to.saw(event)
                self._give(handle, to, _failure(event, failed) or event)
            elif ended:
                self._given_up.discard(handle)
            elif handle not in self._given_up:
                # A leftover of an earlier stream; the sequence has been submitted again since.
                self._tell_to_cancel(handle, FinishReason.CANCELLED)

    def _disconnect(self, error: QuireError, broken: bool, severed: bool = False) -> None:
        """Inform the listener first: a sink that gets Lost must find this worker gone."""
        self._outbox = None
        self._given_up.clear()
        self._queries.lose(error)
        self._adapter_queries.lose(error)
        self._listener.disconnected(self, error)
        self.abandon(str(error), broken, severed)


def _failure(event: SequenceEvent, failed: Breakdown) -> Lost | Refused | None:
    """Return what an error means: the sequences of a failed step are lost together, a wrong request is refused."""
    if isinstance(event, SequenceFinished) and event.reason is FinishReason.ERROR:
        if event.wrong_field:
            return Refused(InvalidRequest(FieldViolation(event.wrong_field, event.message)))
        return Lost(event.message or f"the worker ended it: {event.reason.value}", failed)
    return None
