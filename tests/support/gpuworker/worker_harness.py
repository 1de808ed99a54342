"""A worker's service on 127.0.0.1 with a real engine behind it, and the router's end of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from grpc import aio

from common.contracts.hashing import block_digests, block_hash_of, little_endian_int32, root_digest
from common.contracts.lease import LeaseChannel
from common.contracts.types import KvGeometry, PoolIdentity
from common.rpc.server import RpcServer, open_channel
from common.rpc.silence import SILENCE_S
from common.telemetry.spans import RecordedSpan
from common.wire.packing import pack_hashes, unpack_u32
from gpuworker.engine.engine import Engine
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.server.servicer import GpuWorkerServicer, Serving
from gpuworker.server.step_spans import StepSpans
from gpuworker.server.submit_check import SubmitLimits
from gpuworker.structured.grammars import GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.fake_engine_ports import ManualRunner
from tests.support.spans import CollectedSpans
from tests.support.waiting import until

CONFIG = AgentConfig(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
IDENTITY = PoolIdentity("model", "tokenizer", CONFIG.block_size, KvGeometry(1, 1, 1, 1, "float32"))
LIMITS = SubmitLimits(max_model_len=64, vocab_size=100, identity=IDENTITY)
PATIENCE = 120.0
TRACED = f"00-{1:032x}-{1:016x}-01"


def submit(handle: int, prompt: Sequence[int], count: int, **fields: object) -> pb.StreamRequest:
    """Return a greedy sequence of `count` tokens in all, with the hashes of its prompt."""
    sampling = types.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=count)
    message = pb.Submit(handle=handle, prompt_token_ids=little_endian_int32(prompt), sampling=sampling)
    message.block_hashes, message.parent_digest = chain_of(prompt, LIMITS.identity)
    for name, value in fields.items():
        setattr(message, name, value)
    return pb.StreamRequest(submit=message)


def chain_of(prompt: Sequence[int], identity: PoolIdentity, domain: bytes = b"") -> tuple[bytes, bytes]:
    """Return the packed hashes of a prompt's full blocks, and the digest of the last one or the root."""
    size = identity.block_size
    root = root_digest(identity.model_fingerprint, identity.tokenizer_fingerprint, size, domain)
    digests = block_digests(root, prompt, size)
    return pack_hashes(map(block_hash_of, digests)), digests[-1] if digests else root


@dataclass
class RouterEnd:
    """The router's end of a stream, and what came over it."""

    call: aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    admitted: dict[int, pb.SequenceAdmitted] = field(default_factory=dict)
    logprobs: dict[int, list[types.TokenLogprobs]] = field(default_factory=dict)
    finished: dict[int, pb.SequenceFinished] = field(default_factory=dict)

    async def send(self, *messages: pb.StreamRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def read(self) -> pb.StreamResponse | None:
        """Return the next message, None at the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            response = await self.call.read()
        if not isinstance(response, pb.StreamResponse):
            return None
        self._take(response.outputs)
        return response

    def _take(self, outputs: pb.StepOutputs) -> None:
        counts, sampled = iter(unpack_u32(outputs.counts)), iter(unpack_u32(outputs.token_ids))
        for handle in unpack_u32(outputs.handles):
            self.tokens.setdefault(handle, []).extend(next(sampled) for _ in range(next(counts)))
        for handle, one in zip(unpack_u32(outputs.logprob_handles), outputs.logprobs, strict=True):
            self.logprobs.setdefault(handle, []).append(one)
        self.admitted.update({admit.handle: admit for admit in outputs.admitted})
        self.finished.update({end.handle: end for end in outputs.finished})

    async def until(self, kind: str) -> pb.StreamResponse:
        """Read up to the next message of a kind, and return it."""
        while (response := await self.read()) is not None:
            if response.WhichOneof("message") == kind:
                return response
        raise AssertionError(f"the stream ended before any {kind}")

    async def until_sampled(self, *handles: int) -> None:
        """Read until each of these has a token."""
        while not self.tokens.keys() >= set(handles):
            await self._read_on()

    async def until_finished(self, *handles: int) -> None:
        """Read until each of these has ended; none may be refused."""
        while not self.finished.keys() >= set(handles):
            await self._read_on()

    async def _read_on(self) -> None:
        response = await self.read()
        assert response is not None, "the stream ended"
        assert not response.HasField("refused"), response


class Served:
    """A servicer with its engine, listening."""

    def __init__(
        self,
        runner: StepRunner,
        channel: LeaseChannel | None,
        config: AgentConfig,
        orphan_grace: float = 0.0,
        silence: float = SILENCE_S,
    ) -> None:
        self.collected = CollectedSpans()
        tracer = self.collected.tracer
        self.servicer = GpuWorkerServicer(tracer, orphan_grace, StepSpans(tracer), silence)
        self.driver = EngineDriver(runner, config, channel, sink=self.servicer.deliver)
        self.engine: Engine = self.driver.engine
        self.address = ""

    def serve(self, limits: SubmitLimits = LIMITS, grammars: GrammarCompiler | None = None) -> None:
        """Report the model as loaded."""
        info = lambda: pb.WorkerInfo(worker_id="w0", incarnation=self.engine.attach.incarnation)  # noqa: E731
        self.servicer.serve(Serving(self.engine, info, limits, pb.MemoryPlan(total=7), grammars))

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[rpc.GpuWorkerServiceStub]:
        async with open_channel(self.address) as channel:
            yield rpc.GpuWorkerServiceStub(channel)

    @asynccontextmanager
    async def router(self) -> AsyncIterator[RouterEnd]:
        """Open a stream and exchange hellos."""
        async with self.stub() as stub:
            router = RouterEnd(stub.Stream())
            await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r0")))
            await router.until("hello")
            yield router

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds that the engine's thread or the loop brings about."""
        await until(condition, every=0.002, seconds=PATIENCE)

    async def step_until(self, runner: ManualRunner, condition: Callable[[], bool]) -> None:
        """Complete steps, as they come, until something holds that they or the loop bring about."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                if runner.submitted:
                    runner.step()
                await asyncio.sleep(0.002)

    def spans(self) -> dict[str, RecordedSpan]:
        return {span.name: span for span in self.collected.ended()}


@asynccontextmanager
async def served(
    runner: StepRunner,
    channel: LeaseChannel | None = None,
    loaded: bool = True,
    config: AgentConfig = CONFIG,
    orphan_grace: float = 0.0,
    record_steps: Callable[[], bool] | None = None,
    silence: float = SILENCE_S,
) -> AsyncIterator[Served]:
    """Run a worker's service; every sequence must be gone when it ends."""
    worker = Served(runner, channel, config, orphan_grace, silence)
    if record_steps is not None:
        worker.engine.record_steps(record_steps)
    server = RpcServer(["quire.gpuworker.v1.GpuWorkerService"])
    rpc.add_GpuWorkerServiceServicer_to_server(worker.servicer, server.server)
    worker.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    worker.engine.start()
    if loaded:
        worker.serve()
    try:
        yield worker
        await worker.until(lambda: worker.servicer.live_sequences == 0)
    finally:
        if isinstance(runner, ManualRunner):
            runner.release()  # the engine ends after the steps that run
        await server.stop(0.0)
        await asyncio.to_thread(worker.engine.stop)
