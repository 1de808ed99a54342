"""A worker's streams over real gRPC, on a real engine: what a router is told, and what is left when it or the worker
goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from google.rpc import status_pb2
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.hashing import chain, key_of, little_endian_int32
from common.identity_wire import identity_to_proto
from common.lease import Attached, AttachOk, Connected, LeaseChannel
from common.packing import pack_hashes, unpack_u32
from common.rpc.server import RpcServer, open_channel
from common.types import KvGeometry, PoolIdentity
from gpuworker import servicer as servicer_module
from gpuworker.convert import SubmitLimits
from gpuworker.core.outcomes import AgentConfig
from gpuworker.engine import Engine
from gpuworker.servicer import GpuWorkerServicer, Serving
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from tests.gpuworker.engine_doubles import InstantRunner, ManualRunner, ScriptedChannel
from tests.gpuworker.engine_driver import EngineDriver

CONFIG = AgentConfig(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
LIMITS = SubmitLimits(max_model_len=64, vocab_size=100, block_size=CONFIG.block_size)
PATIENCE = 8.0
TRACED = f"00-{1:032x}-{1:016x}-01"

pytestmark = pytest.mark.timeout(60)


def submit(handle: int, prompt: Sequence[int], count: int, **fields: object) -> pb.StreamRequest:
    """Return a greedy sequence of `count` tokens in all."""
    sampling = types.SamplingParams(temperature=0.0, max_tokens=count)
    links = chain(bytes(32), prompt, CONFIG.block_size)
    message = pb.Submit(handle=handle, prompt_token_ids=little_endian_int32(prompt), sampling=sampling)
    message.chain, message.chain_tail = pack_hashes(map(key_of, links)), links[-1] if links else bytes(32)
    for name, value in fields.items():
        setattr(message, name, value)
    return pb.StreamRequest(submit=message)


@dataclass
class RouterEnd:
    """The router's end of a stream, and what came over it."""

    call: aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]
    tokens: dict[int, list[int]] = field(default_factory=dict)
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
        counts = iter(unpack_u32(response.outputs.counts))
        drawn = iter(unpack_u32(response.outputs.token_ids))
        for handle in unpack_u32(response.outputs.handles):
            self.tokens.setdefault(handle, []).extend(next(drawn) for _ in range(next(counts)))
        self.finished.update({end.handle: end for end in response.outputs.finished})
        return response

    async def until(self, kind: str) -> pb.StreamResponse:
        """Read up to the next message of a kind, and return it."""
        while (response := await self.read()) is not None:
            if response.WhichOneof("message") == kind:
                return response
        raise AssertionError(f"the stream ended before any {kind}")

    async def until_finished(self, *handles: int) -> None:
        while not self.finished.keys() >= set(handles):
            assert await self.read() is not None, "the stream ended"


class Served:
    """A servicer with its engine, listening."""

    def __init__(self, runner: ManualRunner, channel: LeaseChannel | None) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.servicer = GpuWorkerServicer(provider.get_tracer("test"))
        self.driver = EngineDriver(runner, CONFIG, channel, sink=self.servicer.deliver)
        self.engine: Engine = self.driver.engine
        self.address = ""

    def serve(self) -> None:
        """Say that the model is loaded."""
        info = lambda: pb.WorkerInfo(worker_id="w0", incarnation=self.engine.attach.incarnation)  # noqa: E731
        self.servicer.serve(Serving(self.engine, info, LIMITS, pb.MemoryLedger(total=7)))

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
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - it changes on another thread
                await asyncio.sleep(0.002)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@asynccontextmanager
async def served(
    runner: ManualRunner, channel: LeaseChannel | None = None, loaded: bool = True
) -> AsyncIterator[Served]:
    """Run a worker's service; every sequence must be gone when it ends."""
    worker = Served(runner, channel)
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
        await server.stop(0.0)
        await asyncio.to_thread(worker.engine.stop)


async def test_a_sequence_is_admitted_drawn_and_finished() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(5, [1, 2, 3], 4))
        await router.until_finished(5)
        assert router.tokens == {5: [7] * 4}
        end = router.finished[5]
        assert end.reason == types.FINISH_REASON_LENGTH
        assert (end.usage.prompt_tokens, end.usage.output_tokens) == (3, 4)


async def test_output_of_an_earlier_run_counts_as_output() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3, 7, 7], 4, output_tokens_before=2))
        await router.until_finished(1)
        assert router.tokens == {1: [7, 7]}
        usage = router.finished[1].usage
        assert (usage.prompt_tokens, usage.output_tokens) == (3, 4)


async def test_a_stream_must_begin_with_hello() -> None:
    async with served(InstantRunner()) as worker, worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        await router.send(submit(1, [1], 1))
        with pytest.raises(aio.AioRpcError, match="must be hello") as caught:
            await router.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_of_another_pool_is_refused_with_both_values() -> None:
    other = PoolIdentity("model", "tokenizer", 8, KvGeometry(1, 1, 1, 1, "float32"))
    async with served(InstantRunner()) as worker, worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r", identity=identity_to_proto(other))))
        with pytest.raises(aio.AioRpcError) as caught:
            await router.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = caught.value.details() or ""
        assert "block_size" in details
        assert "4" in details
        assert "8" in details


async def test_while_the_model_loads_nothing_is_served() -> None:
    async with served(InstantRunner(), loaded=False) as worker, worker.stub() as stub:
        with pytest.raises(aio.AioRpcError, match="loading its model") as caught:
            await stub.GetWorker(pb.GetWorkerRequest(), timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


BAD = {
    "too long": submit(1, [1] * 64, 1),
    "no prompt": submit(1, [1, 2], 4, output_tokens_before=2),
    "no such token": submit(1, [1, 100], 1),
    "no chain": submit(1, [1] * 8, 1, chain=b""),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_submit_is_refused_alone_and_its_spans_end(what: str) -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        BAD[what].submit.traceparent = TRACED
        await router.send(BAD[what], submit(2, [1, 2, 3], 2))
        refused = (await router.until("refused")).refused
        assert refused.handle == 1
        assert status_pb2.Status.FromString(refused.status).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        await router.until_finished(2)
        assert {name: span.status.is_ok for name, span in worker.spans().items()} == {
            "sequence": False,
            "reserve": False,
        }


async def test_a_handle_in_use_is_refused() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 1), submit(1, [4, 5], 1))
        refused = (await router.until("refused")).refused
        assert status_pb2.Status.FromString(refused.status).code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        await asyncio.to_thread(runner.step)
        await router.until_finished(1)


async def test_the_deadline_of_a_submit_ends_it() -> None:
    async with served(ManualRunner(), ScriptedChannel()) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 4, timeout_seconds=0.0, traceparent=TRACED))
        await router.until_finished(1)
        assert router.finished[1].reason == types.FINISH_REASON_DEADLINE
        spans = worker.spans()
        assert {name: span.status.description for name, span in spans.items()} == {
            "sequence": "deadline exceeded",
            "reserve": "deadline exceeded",
        }


async def test_a_cancel_ends_a_sequence_with_the_reason_that_it_gives() -> None:
    async with served(ManualRunner(), ScriptedChannel()) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 4))
        cancel = pb.Cancel(handle=1, reason=types.FINISH_REASON_STOP)
        await router.send(pb.StreamRequest(cancel=pb.Cancel(handle=99)), pb.StreamRequest(cancel=cancel))
        await router.until_finished(1)
        assert router.finished[1].reason == types.FINISH_REASON_STOP


async def test_what_a_lost_router_leaves_is_cancelled_and_its_spans_end() -> None:
    runner = ManualRunner()
    async with served(runner) as worker:
        async with worker.router() as router:
            await router.send(submit(1, [1, 2, 3], 40, traceparent=TRACED))
            await asyncio.to_thread(runner.await_submissions, 2)
            router.call.cancel()
        for _ in range(2):
            await asyncio.to_thread(runner.step)
        await worker.until(lambda: not runner.known and worker.servicer.live_sequences == 0)
        await worker.until(lambda: "sequence" in worker.spans())
        spans = worker.spans()
        assert spans["sequence"].status.description == "cancelled"
        assert spans["reserve"].status.is_unset, "it got its blocks"
        assert not worker.servicer._streams


async def test_every_router_hears_at_once_that_the_worker_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "HEARTBEAT_SECONDS", 3600.0)
    async with served(InstantRunner()) as worker, worker.router() as router, worker.stub() as stub:
        assert not (await router.until("heartbeat")).heartbeat.load.draining
        worker.servicer.drain()
        assert (await router.until("heartbeat")).heartbeat.load.draining
        with pytest.raises(aio.AioRpcError, match="draining"):
            await RouterEnd(stub.Stream()).read()
        answer = await stub.GetWorker(pb.GetWorkerRequest(), timeout=PATIENCE)
        assert (answer.load.draining, answer.info.worker_id, answer.memory.total) == (True, "w0", 7)


async def test_a_closing_worker_ends_its_streams_and_calls_nobodys_request_cancelled() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 40))
        await asyncio.to_thread(runner.await_submissions, 2)
        worker.servicer.close()
        while await router.read() is not None:
            pass
        assert await router.call.code() is grpc.StatusCode.OK
        for _ in range(2):
            await asyncio.to_thread(runner.step)
        await worker.until(lambda: worker.servicer.live_sequences == 0)
        assert not router.finished


async def test_a_failed_step_is_told_to_every_router_also_of_a_resumed_sequence() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as first, worker.router() as second:
        await first.send(submit(1, [1, 2, 3, 7, 7], 8, output_tokens_before=2))
        await second.send(submit(1, [4, 5, 6], 8))
        await worker.until(lambda: len(runner.known) == 2)
        before = worker.engine.attach.incarnation
        runner.fail()
        await first.until_finished(1)
        await second.until_finished(1)
        usage = first.finished[1].usage
        assert (usage.prompt_tokens, usage.output_tokens) == (3, 2)
        assert second.finished[1].message == "the device is gone"
        async with worker.stub() as stub:
            answer = await stub.GetWorker(pb.GetWorkerRequest(), timeout=PATIENCE)
        assert answer.info.incarnation == worker.engine.attach.incarnation != before


async def test_a_traced_sequence_leaves_its_waits_chunks_and_decodes() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, list(range(20)), 5, traceparent=TRACED))  # a step takes 16 tokens
        await router.until_finished(1)
        spans = worker.exporter.get_finished_spans()
        assert sorted(span.name for span in spans) == [
            "decode",
            "prefill chunk",
            "prefill chunk",
            "reserve",
            "sequence",
        ]
        found = worker.spans()
        assert all(span.status.is_unset for span in spans)
        assert dict(found["decode"].attributes or {}) == {"quire.steps": 4, "quire.output_tokens": 5}
        assert found["sequence"].parent is not None
        assert found["sequence"].parent.trace_id == 1
        context = found["sequence"].get_span_context()
        assert context is not None
        root = context.span_id
        assert all(span.parent and span.parent.span_id == root for span in spans if span.name != "sequence")


async def test_sequences_that_wait_for_an_absent_manager_hold_no_stop_up() -> None:
    channel = ScriptedChannel()
    channel.events.extend([Connected(), Attached(1, AttachOk(1, 0))])
    async with served(ManualRunner(), channel) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 4, traceparent=TRACED))
        await worker.until(lambda: worker.engine.load().waiting == 1)
        worker.servicer.close()
        async with asyncio.timeout(PATIENCE):
            await asyncio.to_thread(worker.engine.stop)
        await worker.until(lambda: "sequence" in worker.spans())
