"""The worker's gRPC service: one stream for each router, its heartbeat, and the worker's description of itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace import Tracer

from common.errors import FieldViolation, IdentityMismatch, InvalidRequest, Unavailable
from common.types import PoolIdentity, SequenceId
from common.wire.identity_codec import identity_from_proto
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineOutputs
from gpuworker.server.codec import SubmitLimits, load_message
from gpuworker.server.router_stream import RouterStream
from gpuworker.structured.grammars import GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc

# Only this tells a router of the other routers' requests. In a simulation of 40 requests of half a second from three
# routers, two workers were 20 requests apart on average at 0.5 s, and 4 at 0.1 s (tests/router/core).
HEARTBEAT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Serving:
    """What a worker serves once its model is loaded."""

    engine: Engine
    info: Callable[[], pb.WorkerInfo]
    limits: SubmitLimits
    memory: pb.MemoryPlan
    grammars: GrammarCompiler | None = None


class GpuWorkerServicer(rpc.GpuWorkerServiceServicer):
    """Serves routers; `deliver` is the engine's sink and may be called from its thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._loop = tracer, asyncio.get_running_loop()
        self._serving: Serving | None = None
        self._streams: set[RouterStream] = set()
        self._owner: dict[SequenceId, RouterStream] = {}
        self._ids = itertools.count(1)
        self.draining = False

    def serve(self, serving: Serving) -> None:
        self._serving = serving

    def drain(self) -> None:
        """Accept no new streams; ask the routers of open streams at once to send nothing more."""
        self.draining = True
        self.beat()

    def beat(self) -> None:
        """Send the present load to every router, before the next heartbeat is due."""
        for stream in self._streams:
            self._beat_once(stream)

    def close(self) -> None:
        """End every stream. Sequences that still run are cancelled here; their routers resubmit them elsewhere."""
        for stream in self._streams:
            stream.close()

    @property
    def live_sequences(self) -> int:
        """Sequences that some router waits for."""
        return len(self._owner) + sum(stream.compiling for stream in self._streams)

    # ------------------------------------------------------------ engine -> routers

    def deliver(self, outputs: EngineOutputs) -> None:
        """Hand a step's outputs to the I/O loop; any thread."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: EngineOutputs) -> None:
        if len(self._streams) == 1:
            concerned = self._streams
        else:
            named = itertools.chain(
                (admit.sequence for admit in outputs.admitted),
                (sequence for sequence, _ in outputs.tokens),
                outputs.preempted,
                (end.sequence for end in outputs.finished),
                (chunk.sequence for chunk in outputs.chunks),
            )
            concerned = {self._owner[sequence] for sequence in named if sequence in self._owner}
        for stream in concerned:
            stream.deliver(outputs)
        for end in outputs.finished:
            stream_of = self._owner.pop(end.sequence, None)
            if stream_of is not None and stream_of.closed and not stream_of.sequences:
                self._streams.discard(stream_of)

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
        """Serve one router until it goes; its remaining sequences are cancelled."""
        serving = self._ready()
        await self._greet(serving.engine.attach.identity, request_iterator)
        own = self._owner.__setitem__
        stream = RouterStream(serving.engine, self._next_sequence, own, serving.limits, self._tracer, serving.grammars)
        stream.push(pb.StreamResponse(hello=pb.WorkerHello(info=serving.info())))
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        heart = asyncio.create_task(self._beat(stream))
        try:
            while (message := stream.take()) is not None or not stream.closed:
                if message is not None:
                    yield message
                else:
                    await stream.ready.wait()
        finally:
            reader.cancel()
            heart.cancel()
            stream.close()
            if not stream.sequences:
                self._streams.discard(stream)
            await asyncio.gather(reader, heart, return_exceptions=True)

    def _loaded(self) -> Serving:
        if self._serving is None:
            raise Unavailable("the worker is loading its model")
        return self._serving

    def _ready(self) -> Serving:
        if self.draining:
            raise Unavailable("the worker is draining")
        return self._loaded()

    async def _greet(self, identity: PoolIdentity, requests: AsyncIterator[pb.StreamRequest]) -> None:
        """Read the router's Hello; InvalidRequest without one, IdentityMismatch when its pool is not this one."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest(FieldViolation("message", "the first message of a stream must be hello"))
        if first.hello.HasField("identity"):
            differences = identity.differences(identity_from_proto(first.hello.identity))
            if differences:
                raise IdentityMismatch(differences)

    async def _read(self, stream: RouterStream, requests: AsyncIterator[pb.StreamRequest]) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "submit":
                        stream.submit(request.submit)
                    case "cancel":
                        stream.cancel(request.cancel)
                    case _:
                        pass
        finally:
            stream.close()

    async def _beat(self, stream: RouterStream) -> None:
        while True:
            self._beat_once(stream)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _beat_once(self, stream: RouterStream) -> None:
        stream.beat(self._load(self._loaded()))

    def _load(self, serving: Serving) -> pb.Load:
        return load_message(serving.engine.load(), self.draining)

    def _next_sequence(self) -> SequenceId:
        return SequenceId(next(self._ids))
