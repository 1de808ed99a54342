"""The worker's gRPC service: one stream for each router, its heartbeat, and the worker's description of itself."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from opentelemetry.trace import Tracer

from common.contracts.clock import until_tick
from common.contracts.errors import (
    DeadlineExceeded,
    EngineFailure,
    FieldViolation,
    IdentityMismatch,
    InvalidRequest,
    Overloaded,
    QuireError,
    QuotaViolation,
    Unavailable,
)
from common.contracts.limits import MAX_ROUTER_STREAMS, ROUTER_HELLO_SECONDS
from common.contracts.types import FinishReason, PoolIdentity, SequenceId
from common.rpc.pulses import SilenceWatch
from common.rpc.silence import SILENCE_S
from common.wire.identity_codec import identity_from_proto
from common.wire.packing import unpack_u32
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineOutputs
from gpuworker.plane.adapters import AdapterStore
from gpuworker.server.codec import load_message
from gpuworker.server.orphans import Orphans
from gpuworker.server.router_stream import RouterStream
from gpuworker.server.spans import SequenceSpans
from gpuworker.server.step_spans import StepSpans
from gpuworker.server.submit_check import SubmitLimits
from gpuworker.structured.grammars import GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc

log = logging.getLogger(__name__)

# A router learns of the other routers' requests by this alone. A simulation (tests/router/placement) has 40 requests of
# half a second from three routers. Two workers were 20 requests apart on average at 0.5 s, and 4 at 0.1 s.
HEARTBEAT_SECONDS = 0.1
# While a worker has nothing to do, and its routers know that. It goes with the pulses, at the same moments.
IDLE_HEARTBEAT_SECONDS = SILENCE_S / 3
_RETRY_SECONDS: Final = 5.0  # until another router may have left
_LOAD_SECONDS: Final = 2.0  # of waiting for the model; a router waits five for the worker's hello


@dataclass(frozen=True, slots=True)
class Serving:
    """What a worker serves once its model is loaded."""

    engine: Engine
    info: Callable[[], pb.WorkerInfo]
    limits: SubmitLimits
    memory: pb.MemoryPlan
    grammars: GrammarCompiler | None = None
    adapters: AdapterStore | None = None


class GpuWorkerServicer(rpc.GpuWorkerServiceServicer):
    """Serves routers; `deliver` is the engine's sink and may be called from its thread.

    What a lost router leaves runs on for `orphan_grace` seconds, and longer while there is no router. `steps` makes the
    spans of recorded steps. A router that sends pulses is lost after `silence` seconds without any message.
    """

    def __init__(
        self, tracer: Tracer, orphan_grace: float = 0.0, steps: StepSpans | None = None, silence: float = SILENCE_S
    ) -> None:
        self._tracer, self._loop, self._steps = tracer, asyncio.get_running_loop(), steps
        self._silence = silence
        self.orphans = Orphans(orphan_grace, self._cancel, self._has_router)
        self._serving: Serving | None = None
        self._is_loaded = asyncio.Event()
        self._stirred = asyncio.Event()  # something happened since the routers of an idle worker heard of its load
        self._streams: set[RouterStream] = set()
        # The open stream of each connection of a router, by the router's incarnation and the connection's number.
        self._connections: dict[tuple[bytes, int], RouterStream] = {}
        self._unnamed = 0  # streams that have not sent their hello
        # None: it is an orphan.
        self._owner: dict[SequenceId, RouterStream | None] = {}
        self._ids = itertools.count(1)
        self.draining = self._migrating = False

    def serve(self, serving: Serving) -> None:
        self._serving = serving
        if serving.adapters is not None:
            serving.adapters.changed = self._tell_of_adapters
        self._is_loaded.set()

    def _tell_of_adapters(self) -> None:
        """Tell every router which adapters there are now."""
        for stream in self._streams:
            stream.tell_of_adapters()

    def drain(self, migrate: bool = False) -> None:
        """Accept no new streams; ask the routers of open streams at once to send nothing more.

        With `migrate` they also move the sequences that they have here to other workers.
        """
        self.draining, self._migrating = True, migrate
        self.orphans.router_came()
        self.beat()

    def beat(self) -> None:
        """Send the present load to every router, before the next heartbeat is due."""
        self._stirred.set()
        for stream in self._streams:
            self._beat_once(stream)

    def fail(self, error: QuireError) -> None:
        """End every stream with an error: the process ends now, and routers move the sequences."""
        for stream in self._streams:
            stream.fail(error)

    def close(self) -> None:
        """End every stream. Sequences that still run are cancelled here; their routers resubmit them elsewhere."""
        for stream in self._streams:
            stream.close()
        self.orphans.close()

    @property
    def live_sequences(self) -> int:
        """Sequences that some router waits for, or may adopt; ended ones count until another worker has them."""
        waiting = sum(stream.compiling + stream.handed_over for stream in self._streams)
        return len(self._owner) + waiting + self.orphans.handed_over

    # ------------------------------------------------------------ engine -> routers

    def deliver(self, outputs: EngineOutputs) -> None:
        """Hand a step's outputs to the I/O loop; any thread."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: EngineOutputs) -> None:
        self._stirred.set()
        if self._steps is not None:
            for record in outputs.steps:  # before the ends of their sequences
                self._steps.add(record, self._spans_of)
        if len(self._streams) == 1 and not self.orphans.waits:
            concerned = self._streams
        else:
            named = itertools.chain(
                (admit.sequence for admit in outputs.admitted),
                (sequence for sequence, _ in outputs.tokens),
                outputs.preempted,
                (end.sequence for end in outputs.finished),
                (chunk.sequence for chunk in outputs.chunks),
                outputs.prompt_logprobs,
                outputs.recounted,
                (started.sequence for started in outputs.started),
                (delay.sequence for delay in outputs.delayed),
            )
            owners = {self._owner[sequence] for sequence in named if sequence in self._owner}
            concerned = {stream for stream in owners if stream is not None}
            if None in owners:
                self.orphans.deliver(outputs)
        for stream in concerned:
            stream.deliver(outputs)
        for end in outputs.finished:
            stream_of = self._owner.pop(end.sequence, None)
            if stream_of is not None and stream_of.closed and not stream_of.sequences:
                self._streams.discard(stream_of)

    def _spans_of(self, sequence: SequenceId) -> SequenceSpans | None:
        """Return the spans of a traced sequence, unless it has ended or lost its router."""
        stream = self._owner.get(sequence)
        return stream.spans_of(sequence) if stream is not None else None

    # ------------------------------------------------------------ RPCs

    async def GetWorker(
        self, request: pb.GetWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetWorkerResponse:
        """Identity, load and the byte plan."""
        serving = self._loaded()
        return pb.GetWorkerResponse(info=serving.info(), load=self._load(serving), memory=serving.memory)

    async def Stream(
        self,
        request_iterator: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.StreamResponse]:
        """Serve one router until it goes; what it leaves are orphans, or is cancelled."""
        with self._place():
            serving = await self._soon_ready()
            hello = await self._greet(serving.engine.attach.identity, request_iterator)
        own = self._owner.__setitem__
        stream = RouterStream(
            serving.engine, self._next_sequence, own, serving.limits, self._tracer, serving.grammars, serving.adapters
        )
        stream.push(pb.StreamResponse(hello=pb.WorkerHello(info=serving.info(), silence_seconds=self._silence)))
        stream.tell_of_adapters()
        self._begin(stream, hello)
        silence = SilenceWatch(self._silence)
        works = self._read(stream, request_iterator, silence), self._beat(stream), self._watch(stream, hello, silence)
        tasks = [asyncio.create_task(work) for work in works]
        for task in tasks:
            task.add_done_callback(lambda done: self._end(stream, hello.incarnation, done))
        try:
            while (message := stream.take()) is not None or not stream.closed:
                if message is not None:
                    yield message
                else:
                    await stream.ready.wait()
            if stream.failure is not None:
                raise stream.failure
        finally:
            for task in tasks:
                task.cancel()
            self._connections = {name: each for name, each in self._connections.items() if each is not stream}
            if not stream.ended_here:
                self._orphan(stream, hello.incarnation)
            stream.close()
            if not stream.sequences:
                self._streams.discard(stream)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, stream: RouterStream, hello: pb.Hello) -> None:
        """Take up a stream. The earlier one of its connection ends: its router has moved the sequences.

        A router that stood still moves them from now on, and has fewer clients than it knows: what it left stays.
        """
        if hello.connection:
            name = hello.incarnation, hello.connection
            if (earlier := self._connections.get(name)) is not None:
                if hello.stood_still:
                    self._orphan(earlier, hello.incarnation, stood_still=True)
                earlier.close()
            self._connections[name] = stream
        if not hello.stood_still:
            self.orphans.returned(hello.incarnation)
        self._streams.add(stream)
        self.orphans.router_came()

    def _has_router(self) -> bool:
        """Whether a router is connected, or none will come."""
        return self.draining or any(not stream.closed for stream in self._streams)

    def _orphan(self, stream: RouterStream, router: bytes, stood_still: bool = False) -> None:
        """Keep the sequences of a lost router, if it wants that."""
        if not self.orphans.keeps(router):
            return
        stream.lose()
        left = stream.abandon()
        for live in left:
            if not live.ended:
                self._owner[live.id] = None
        self.orphans.take_sequence(b"" if stood_still else router, left)

    def _end(self, stream: RouterStream, router: bytes, done: asyncio.Task[None]) -> None:
        """End a stream with one of its tasks: quietly when the router has gone, else with the error.

        A lost router leaves orphans at once: its stream takes no output, and its writer may wait for gRPC.
        """
        error = None if done.cancelled() else done.exception()
        if error is None:
            stream.lose()
            if not (done.cancelled() or stream.ended_here):
                self._orphan(stream, router)
        elif isinstance(error, QuireError):
            stream.fail(error)
        else:
            log.error("a task of a router's stream failed", exc_info=error)
            stream.fail(EngineFailure("a task of the stream failed; the worker's log has the details"))

    def _cancel(self, sequence: SequenceId, reason: FinishReason) -> None:
        self._loaded().engine.cancel_request(sequence, reason)

    def _adopt(self, stream: RouterStream, message: pb.Adopt) -> None:
        if not stream.takes(message):
            stream.refuse_orphan(message, held=True)
        elif (orphan := self.orphans.adopt(message.sequence)) is not None:
            stream.adopt(message, orphan)
        else:
            sequence = SequenceId(message.sequence)
            stream.refuse_orphan(message, any(each.has(sequence) for each in self._streams))

    def _find(self, stream: RouterStream, message: pb.Find) -> None:
        request = message.tenant, message.request_id
        held = any(each.holds(request) for each in self._streams if not each.closed)
        stream.push(pb.StreamResponse(found=self.orphans.found(message.query, request, held)))

    def _loaded(self) -> Serving:
        if self._serving is None:
            raise Unavailable("the worker is loading its model")
        return self._serving

    async def _soon_ready(self) -> Serving:
        """Return what serves. While the model loads, a router's stream waits, so that it opens with the load's end."""
        if not self.draining:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOAD_SECONDS):
                    await self._is_loaded.wait()
        return self._ready()

    def _ready(self) -> Serving:
        if self.draining:
            raise Unavailable("the worker is draining")
        return self._loaded()

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Count a stream until it has said hello. Raises Overloaded when this worker has as many as it may."""
        taken = self._unnamed + len(self._streams)
        if taken >= MAX_ROUTER_STREAMS:
            what = (
                f"this worker has {taken} streams of routers, and may have {MAX_ROUTER_STREAMS}; each router process "
                "opens one: stop routers, or divide workers and routers into pools"
            )
            raise Overloaded(QuotaViolation("worker.streams", what), _RETRY_SECONDS)
        self._unnamed += 1
        try:
            yield
        finally:
            self._unnamed -= 1

    async def _greet(self, identity: PoolIdentity, requests: AsyncIterator[pb.StreamRequest]) -> pb.Hello:
        """Read the router's Hello. Raises when it does not come, comes late, or names another pool than this one."""
        try:
            async with asyncio.timeout(ROUTER_HELLO_SECONDS):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {ROUTER_HELLO_SECONDS:g} s; a stream begins with it") from None
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest(FieldViolation("message", "the first message of a stream must be hello"))
        if first.hello.HasField("identity"):
            differences = identity.differences(identity_from_proto(first.hello.identity))
            if differences:
                raise IdentityMismatch(differences)
        return first.hello

    async def _read(
        self, stream: RouterStream, requests: AsyncIterator[pb.StreamRequest], silence: SilenceWatch
    ) -> None:
        async for request in requests:
            silence.heard()
            if not request.HasField("pulse"):
                self._stirred.set()
            match request.WhichOneof("message"):
                case "submit":
                    self.orphans.replaced((request.submit.tenant, request.submit.request_id))
                    stream.submit(request.submit)
                case "cancel":
                    stream.cancel(request.cancel)
                case "ack":
                    stream.acknowledge(unpack_u32(request.ack.handles))
                case "find":
                    self._find(stream, request.find)
                case "adopt":
                    self._adopt(stream, request.adopt)
                case "load_adapter" | "unload_adapter":
                    stream.change_adapters(request)
                case "pulse":
                    silence.begin()
                case _:
                    pass

    async def _watch(self, stream: RouterStream, hello: pb.Hello, silence: SilenceWatch) -> None:
        """Lose a router that stands still. Its stream may not end before it runs again: a write to it waits."""
        await silence.over()
        what = f"no message of the router came for {silence.limit:g} s; a router that runs sends pulses"
        log.warning("a stream ends: %s", what)
        stream.lose(DeadlineExceeded(what))
        self._orphan(stream, hello.incarnation, stood_still=True)
        stream.close()

    async def _beat(self, stream: RouterStream) -> None:
        """Send the load ten times a second; rarely while nothing goes on, from when the router knows that."""
        while True:
            told = self._beat_once(stream)
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not self.live_sequences and told == self._load(self._loaded()):
                self._stirred.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_tick(time.monotonic(), IDLE_HEARTBEAT_SECONDS)):
                        await self._stirred.wait()

    def _beat_once(self, stream: RouterStream) -> pb.Load:
        load = self._load(self._loaded())
        stream.beat(load)
        return load

    def _load(self, serving: Serving) -> pb.Load:
        return load_message(serving.engine.load(), self.draining, self._migrating)

    def _next_sequence(self) -> SequenceId:
        return SequenceId(next(self._ids))
