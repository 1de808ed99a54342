"""A worker's streams over real gRPC, on a real engine: what a router receives, and what it leaves."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import status_pb2
from grpc import aio

from common.contracts.lease import Attached, AttachOk, Connected
from common.contracts.types import KvGeometry, PoolIdentity
from common.wire.identity_codec import identity_to_proto
from gpuworker.engine.ports import Delayed, EngineOutputs, Started
from gpuworker.server import servicer as servicer_module
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.gpuworker.fake_engine_ports import InstantRunner, ManualRunner, ScriptedChannel
from tests.support.gpuworker.worker_harness import PATIENCE, TRACED, RouterEnd, served, submit


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


async def test_a_stream_that_comes_while_the_model_loads_opens_with_the_end_of_the_load() -> None:
    async with served(InstantRunner(), loaded=False) as worker, worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r")))
        await worker.until(lambda: worker.servicer._unnamed == 1)
        worker.serve()
        await router.until("hello")
        await router.send(submit(1, [1, 2, 3], 2))
        await router.until_finished(1)


async def test_a_stream_ends_when_the_load_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "_LOAD_SECONDS", 0.01)
    async with served(InstantRunner(), loaded=False) as worker, worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        with pytest.raises(aio.AioRpcError, match="loading its model") as caught:
            await router.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


BAD = {
    "too long": submit(1, [1] * 64, 1),
    "no prompt": submit(1, [1, 2], 4, output_tokens_before=2),
    "endless tenant": submit(1, [1, 2], 4, tenant="n" * 300),
    "no such token": submit(1, [1, 100], 1),
    "no chain": submit(1, [1] * 8, 1, block_hashes=b""),
}

BEGUN = ("no such token", "no chain")  # what is found only when the sequence is made, so its spans have begun


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_submit_is_refused_alone_and_its_spans_end(what: str) -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        BAD[what].submit.traceparent = TRACED
        await router.send(BAD[what], submit(2, [1, 2, 3], 2))
        refused = (await router.until("refused")).refused
        assert refused.handle == 1
        assert status_pb2.Status.FromString(refused.status).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        await router.until_finished(2)
        begun = {"sequence": True, "reserve": False} if what in BEGUN else {}  # it is the router's fault
        assert {name: span.status.is_ok for name, span in worker.spans().items()} == begun


async def test_a_caller_without_a_key_has_a_name_with_a_space() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 2, tenant="peer 127.0.0.1"))
        await router.until_finished(1)
        assert router.finished[1].reason == types.FINISH_REASON_LENGTH


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
        await worker.step_until(runner, lambda: not runner.num_tokens and worker.servicer.live_sequences == 0)
        await worker.until(lambda: "sequence" in worker.spans())
        spans = worker.spans()
        assert spans["sequence"].attributes["quire.ended"] == "cancelled"
        assert spans["reserve"].status.is_unset, "it got its blocks"
        assert not worker.servicer._streams


async def test_every_router_is_notified_at_once_that_the_worker_drains(monkeypatch: pytest.MonkeyPatch) -> None:
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
        await worker.step_until(runner, lambda: worker.servicer.live_sequences == 0)
        assert not router.finished


async def test_a_failed_step_is_reported_to_every_router_also_of_a_resumed_sequence() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as first, worker.router() as second:
        await first.send(submit(1, [1, 2, 3, 7, 7], 8, output_tokens_before=2))
        await second.send(submit(1, [4, 5, 6], 8))
        await worker.until(lambda: len(runner.num_tokens) == 2)
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


async def test_a_first_step_is_told_to_one_of_several_routers_though_it_is_all_that_is_new() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as first, worker.router():
        await first.send(submit(5, [1, 2, 3], 8))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        (sequence,) = worker.servicer._owner
        worker.servicer.deliver(EngineOutputs(step=1, started=(Started(sequence, 0.5, 7, "r9"),)))
        started: list[pb.SequenceStarted] = []
        while not started:
            response = await asyncio.wait_for(first.read(), PATIENCE)
            assert response is not None
            started += response.outputs.started
        assert started == [pb.SequenceStarted(handle=5, wait_seconds=0.5, ahead_tokens=7, ahead_of="r9")]


async def test_a_delay_is_told_to_one_of_several_routers_though_it_is_all_that_is_new() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as first, worker.router():
        await first.send(submit(5, [1, 2, 3], 8))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        (sequence,) = worker.servicer._owner
        worker.servicer.deliver(EngineOutputs(step=1, delayed=(Delayed(sequence, 0.5, 0.25),)))
        delayed: list[pb.SequenceDelayed] = []
        while not delayed:
            response = await asyncio.wait_for(first.read(), PATIENCE)
            assert response is not None
            delayed += response.outputs.delayed
        assert delayed == [pb.SequenceDelayed(handle=5, stalled_seconds=0.5, manager_away_seconds=0.25)]


async def test_a_traced_sequence_leaves_its_waits_chunks_and_decodes() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, list(range(20)), 5, traceparent=TRACED))  # a step takes 16 tokens
        await router.until_finished(1)
        spans = worker.collected.ended()
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


async def test_a_router_of_an_idle_worker_hears_nothing_more_until_it_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "IDLE_HEARTBEAT_SECONDS", 1e6)
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        worker.servicer._stirred.set()
        await worker.until(lambda: not worker.servicer._stirred.is_set())  # it waits for work from now on
        await router.send(submit(1, [1, 2, 3], 1))
        while not (load := (await router.until("heartbeat")).heartbeat.load).waiting + load.running:
            pass
        await asyncio.to_thread(runner.step)
        await router.until_finished(1)
        await worker.until(lambda: not worker.servicer._stirred.is_set())
