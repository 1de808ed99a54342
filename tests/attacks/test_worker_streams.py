"""What one router's stream can do to a worker: bugs that it triggers, and memory that it makes the worker hold.

A bug is put in by hand where the known ones were mended. The server, its streams and the engine are real.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from grpc import aio

from common.contracts.lease import Admit
from common.contracts.types import Constraint, SamplingParams, SequenceId, TokenLogprobs
from gpuworker.engine.ports import EngineOutputs
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.server import codec, router_stream, servicer
from gpuworker.server.output_buffer import OutputBuffer, Waited
from gpuworker.server.router_stream import RouterStream
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.gpuworker.fake_engine_ports import InstantRunner, ManualRunner
from tests.support.gpuworker.runner_harness import SLOTS, queued_on, runner_on, transformers_model
from tests.support.gpuworker.worker_harness import LIMITS, PATIENCE, RouterEnd, served, submit
from tests.support.lost_status import refusal_of
from tests.support.turns import take_turn

PROMPT = list(range(20, 31))
HOSTILE = 666  # the handle, or the seed, that meets the bug


def codes(found: grpc.StatusCode) -> int:
    code: int = found.value[0]
    return code


async def code_of_refusal(router: RouterEnd) -> tuple[int, int]:
    refused = (await router.until("refused")).refused
    return refused.handle, status_pb2.Status.FromString(refused.status).code


# ------------------------------------------------------------ bugs


async def test_outputs_that_cannot_be_packed_end_one_stream_and_leave_no_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Left behind in the table of owners, they once held up every drain for its full time."""
    sound = OutputBuffer.admitted

    def admitted(self: OutputBuffer, handle: int, admit: Admit, waited: Waited) -> None:
        if handle == HOSTILE:
            raise OverflowError("a bug")
        sound(self, handle, admit, waited)

    monkeypatch.setattr(OutputBuffer, "admitted", admitted)
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as hostile, worker.router() as innocent:
        await innocent.send(submit(1, PROMPT, 8))
        await hostile.send(submit(2, PROMPT[:3], 20), submit(HOSTILE, PROMPT[:5], 20))
        broken = asyncio.create_task(hostile.until_finished(2))
        await worker.step_until(runner, broken.done)
        with pytest.raises(aio.AioRpcError) as caught:
            await broken
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        end = asyncio.create_task(innocent.until_finished(1))
        await worker.step_until(runner, lambda: end.done() and not runner.num_tokens)
        assert innocent.tokens == {1: [7] * 8}
        await worker.until(lambda: worker.servicer.live_sequences == 0)


async def test_a_bug_in_taking_a_submit_refuses_that_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = codec.engine_request

    def engine_request(message: pb.Submit, *arguments: Any) -> Any:
        return sound(message, *arguments) if message.handle != HOSTILE else 1 // 0

    monkeypatch.setattr(router_stream, "engine_request", engine_request)
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(HOSTILE, PROMPT, 8), submit(1, PROMPT, 8))
        assert await code_of_refusal(router) == (HOSTILE, codes(grpc.StatusCode.INTERNAL))
        await router.until_finished(1)


async def test_a_reader_that_fails_ends_its_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterStream, "cancel", lambda self, message: 1 // 0)
    async with served(ManualRunner()) as worker, worker.router() as hostile, worker.router() as innocent:
        await hostile.send(submit(1, PROMPT, 50), pb.StreamRequest(cancel=pb.Cancel(handle=1)))
        with pytest.raises(aio.AioRpcError) as caught:
            await hostile.until_finished(1)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        runner = worker.driver.runner
        assert isinstance(runner, ManualRunner)
        await worker.step_until(runner, lambda: worker.servicer.live_sequences == 0 and not runner.num_tokens)
        await innocent.until("heartbeat")


class Unseating(InstantRunner):
    """A runner that cannot take over sequences of one seed."""

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        if sampling.seed == HOSTILE:
            raise ArithmeticError("a bug")
        super().add_sequence(sequence, tokens, sampling, prompt_tokens, adapter)

    def remove(self, sequence: SequenceId) -> None:
        self.num_tokens.pop(sequence, None)


async def test_a_sequence_that_the_runner_cannot_take_over_ends_alone() -> None:
    async with served(Unseating()) as worker, worker.router() as hostile, worker.router() as innocent:
        await hostile.send(seeded(1))
        await innocent.send(submit(1, PROMPT, 8))
        await asyncio.gather(hostile.until_finished(1), innocent.until_finished(1))
        assert hostile.finished[1].reason == types.FINISH_REASON_ERROR
        assert "ArithmeticError('a bug')" in hostile.finished[1].message
        assert innocent.tokens == {1: [7] * 8}
        await asyncio.to_thread(worker.driver.assert_all_free)


def seeded(handle: int) -> pb.StreamRequest:
    request = submit(handle, PROMPT, 8)
    request.submit.sampling.seed = HOSTILE
    return request


@pytest.mark.parametrize("path", ["thread", "native"])
async def test_a_step_that_cannot_be_built_ends_the_sequence_that_is_the_cause(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run on, with every token of theirs as it would have been."""
    sound = SamplingBatch.__init__

    def init(self: SamplingBatch, rows: Sequence[SampledRow], *others: Any) -> None:
        if any(row.params.seed == HOSTILE for row in rows):
            raise OverflowError("a number that no int32 holds")
        sound(self, rows, *others)

    monkeypatch.setattr(SamplingBatch, "__init__", init)
    config = AgentConfig(SLOTS // 4, 4, max_num_batched_tokens=48, max_num_seqs=8)
    directory = checkpoint("llama")
    runner = queued_on(directory, 4) if path == "native" else runner_on(transformers_model(directory), 4)
    limits = type(LIMITS)(256, 264, LIMITS.identity)
    async with served(runner, config=config, loaded=False) as worker:
        worker.serve(limits)
        async with worker.router() as hostile, worker.router() as innocent:
            await innocent.send(submit(1, PROMPT, 60), submit(2, PROMPT[:6], 60))
            await innocent.until_sampled(1, 2)
            await hostile.send(seeded(1))
            await asyncio.gather(hostile.until_finished(1), innocent.until_finished(1, 2))
            assert hostile.finished[1].reason == types.FINISH_REASON_ERROR
            assert "no int32 holds" in hostile.finished[1].message
            wanted = {1: hf_greedy(directory, PROMPT, 60), 2: hf_greedy(directory, PROMPT[:6], 60)}
            assert innocent.tokens == wanted
            await asyncio.to_thread(worker.driver.assert_all_free)


# ------------------------------------------------------------ turns


class HeldCompiler(GrammarCompiler):
    """Begins to compile when the test says so, and notes the order."""

    def __init__(self) -> None:
        super().__init__(checkpoint("llama") / "tokenizer.json", VOCAB_SIZE, (EOS,))
        self.go_on, self.order = threading.Event(), list[str]()

    def _compile(self, constraint: Constraint) -> Grammar:
        assert self.go_on.wait(PATIENCE)
        self.order.append(constraint.text)
        return super()._compile(constraint)


async def test_constraints_of_one_tenant_delay_another_by_one_compilation() -> None:
    """They were compiled in the order of arrival: 66 costly ones held up all others, of every router."""
    compiler = HeldCompiler()
    async with served(InstantRunner(), loaded=False) as worker:
        worker.serve(LIMITS, compiler)
        async with worker.router() as one, worker.router() as other:
            await one.send(*(submit(handle, PROMPT, 2, regex="a" * handle, tenant="many") for handle in range(1, 67)))
            await worker.until(lambda: worker.servicer.live_sequences == 66)
            await one.send(submit(100, PROMPT, 2, regex="b", tenant="few"))
            await other.send(submit(1, PROMPT, 2, regex="c", tenant="fewer"))
            await worker.until(lambda: worker.servicer.live_sequences == 68)
            compiler.go_on.set()
            await asyncio.gather(one.until_finished(100), other.until_finished(1))
            await one.until_finished(*range(1, 67))
    assert sorted(compiler.order[:4]) == ["a", "aa", "b", "c"]


# ------------------------------------------------------------ memory


async def error_of(router: RouterEnd) -> aio.AioRpcError:
    """Read a stream up to the error that ends it."""
    try:
        while await router.read() is not None:
            pass
    except aio.AioRpcError as error:
        return error
    raise AssertionError("the stream ended without an error")


async def greeted(stub: rpc.GpuWorkerServiceStub) -> None:
    """Open a stream of a router, and wait for the first answer."""
    router = RouterEnd(stub.Stream())
    await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r")))
    await router.read()


async def test_streams_of_routers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_ROUTER_STREAMS", 2)
    async with served(InstantRunner()) as worker, worker.router() as innocent, worker.stub() as stub:
        async with worker.router():
            refusal = await refusal_of(lambda: greeted(stub))
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "this worker has 2 streams of routers" in (refusal.details() or "")
            assert "stop routers" in (refusal.details() or "")
        await worker.until(lambda: len(worker.servicer._streams) == 1)
        await innocent.send(submit(1, PROMPT, 4))
        await innocent.until_finished(1)
        async with worker.router():
            assert len(worker.servicer._streams) == 2  # there is room again


async def test_streams_without_a_hello_count_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_ROUTER_STREAMS", 2)
    monkeypatch.setattr(servicer, "ROUTER_HELLO_SECONDS", 0.2)
    async with served(InstantRunner()) as worker, worker.stub() as stub:
        silent = [RouterEnd(stub.Stream()) for _ in range(2)]
        for each in silent:
            assert (await error_of(each)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        monkeypatch.setattr(servicer, "ROUTER_HELLO_SECONDS", PATIENCE)
        silent = [RouterEnd(stub.Stream()) for _ in range(2)]
        await worker.until(lambda: worker.servicer._unnamed == 2)
        assert (await refusal_of(lambda: greeted(stub))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in silent:
            each.call.cancel()
        await worker.until(lambda: worker.servicer._unnamed == 0)
        async with worker.router() as innocent:
            await innocent.send(submit(1, PROMPT, 4))
            await innocent.until_finished(1)


async def test_a_router_has_so_many_sequences_at_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, "MAX_STREAM_SEQUENCES", 3)
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as hostile, worker.router() as innocent:
        await hostile.send(*(submit(handle, PROMPT[:3], 4) for handle in range(1, 6)))
        refused = [await code_of_refusal(hostile), await code_of_refusal(hostile)]
        assert refused == [(4, codes(grpc.StatusCode.RESOURCE_EXHAUSTED)), (5, refused[0][1])]
        await innocent.send(submit(1, PROMPT, 4))
        done = asyncio.gather(innocent.until_finished(1), hostile.until_finished(1, 2, 3))
        await worker.step_until(runner, done.done)
        await done
        await hostile.send(submit(6, PROMPT[:3], 4))  # there is room again
        end = asyncio.create_task(hostile.until_finished(6))
        await worker.step_until(runner, end.done)


async def test_a_router_has_so_many_bytes_of_prompts_at_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, "MAX_STREAM_PROMPT_BYTES", 4 * 2 * len(PROMPT))
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(*(submit(handle, PROMPT, 4) for handle in range(1, 4)))
        assert await code_of_refusal(router) == (3, codes(grpc.StatusCode.RESOURCE_EXHAUSTED))
        end = asyncio.create_task(router.until_finished(1, 2))
        await worker.step_until(runner, end.done)
        await router.send(submit(4, PROMPT, 4))
        end = asyncio.create_task(router.until_finished(4))
        await worker.step_until(runner, end.done)


async def test_outputs_for_a_router_that_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(router_stream, "MAX_STREAM_OUTPUT_BYTES", limit)
    one = TokenLogprobs(7, -0.5, tuple((token, -1.0) for token in range(20)))
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as deaf, worker.router() as innocent:
        await deaf.send(submit(1, PROMPT, 20))
        await worker.until(lambda: len(runner.num_tokens) == 1)  # its sequence is the first
        await innocent.send(submit(1, PROMPT[:3], 8))
        await worker.until(lambda: len(runner.num_tokens) == 2)
        stream = worker.servicer._owner[SequenceId(1)]
        assert stream is not None
        most, sent = 0, 0
        outputs = EngineOutputs(1, tokens=((SequenceId(1), (7,) * 64),), logprobs={SequenceId(1): (one,) * 64})
        while not stream.closed and sent < 400 * limit:
            worker.servicer._deliver(outputs)
            most, sent = max(most, stream.backlog), sent + 64 * 20 * 8
            await take_turn()
        assert (stream.closed, stream.backlog) == (True, 0)
        assert most <= limit
        end = asyncio.create_task(innocent.until_finished(1))
        await worker.step_until(runner, lambda: end.done() and not runner.num_tokens)
        assert innocent.tokens == {1: [7] * 8}
        with pytest.raises(aio.AioRpcError, match="does not read") as caught:
            await deaf.until_finished(1)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_backlog_goes_out_in_messages_that_grpc_carries() -> None:
    """One message of everything that gathered was once larger than the limit of a message, and broke the stream."""
    runner = ManualRunner()
    one = TokenLogprobs(7, -0.5, tuple((2**27 + token, -1.0) for token in range(20)))
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 8))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        gathered = EngineOutputs(1, tokens=((SequenceId(1), (7,) * 4096),), logprobs={SequenceId(1): (one,) * 4096})
        for _ in range(24):  # 19 MiB
            worker.servicer._deliver(gathered)
        while len(router.tokens.get(1, ())) < 24 * 4096:
            await router.until("outputs")
        assert len(router.logprobs[1]) == 24 * 4096
        end = asyncio.create_task(router.until_finished(1))
        await worker.step_until(runner, end.done)
