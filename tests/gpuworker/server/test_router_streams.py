"""Routers and the sequences they run at a worker, over real gRPC: identity, deadlines, several routers, forks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from common.contracts.lease import Copy
from common.contracts.types import KvGeometry, PoolIdentity, TokenLogprobs
from common.wire.identity_codec import identity_to_proto
from common.wire.packing import unpack_u32
from gpuworker.engine.ports import EngineOutputs
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.server import servicer as servicer_module
from quire.api.status import DETAILS_KEY
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.gpuworker.fake_engine_ports import InstantRunner, ManualRunner
from tests.support.gpuworker.runner_harness import SLOTS, runner_on, transformers_model
from tests.support.gpuworker.worker_harness import CONFIG, LIMITS, TRACED, RouterEnd, Served, served, submit
from tests.support.lost_status import refusal_of

PROMPT = list(range(20, 31))


def detail(error: aio.AioRpcError, kind: type[Message]) -> Message:
    """Return the detail of a kind that a status carries."""
    trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
    for each in status_pb2.Status.FromString(trailers[DETAILS_KEY]).details:
        found = kind()
        if each.Unpack(found):
            return found
    raise AssertionError(f"no {kind.__name__} in {error.details()}")


async def refused_stream(worker: Served, hello: pb.Hello) -> aio.AioRpcError:
    """Open a stream that the worker must refuse, and return the error."""

    async def greet(router: RouterEnd) -> None:
        await router.send(pb.StreamRequest(hello=hello))
        await router.read()

    async with worker.stub() as stub:
        return await refusal_of(lambda: greet(RouterEnd(stub.Stream())))


# ------------------------------------------------------------ who may open a stream


async def test_a_router_must_try_again_while_the_model_loads() -> None:
    async with served(InstantRunner(), loaded=False) as worker:
        error = await refused_stream(worker, pb.Hello(router_id="r"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    retry = detail(error, error_details_pb2.RetryInfo)
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0


async def test_a_router_must_try_again_while_the_worker_drains() -> None:
    async with served(InstantRunner()) as worker:
        worker.servicer.drain()
        error = await refused_stream(worker, pb.Hello(router_id="r"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    detail(error, error_details_pb2.RetryInfo)


def _identity(**changes: object) -> PoolIdentity:
    return replace(PoolIdentity("model", "tokenizer", CONFIG.block_size, KvGeometry(1, 1, 1, 1, "float32")), **changes)  # type: ignore[arg-type]


def _geometry(**changes: object) -> PoolIdentity:
    return _identity(kv_geometry=replace(_identity().kv_geometry, **changes))  # type: ignore[arg-type]


OTHERS = {
    "model_fingerprint": (_identity(model_fingerprint="other"), "model", "other", "--model"),
    "tokenizer_fingerprint": (_identity(tokenizer_fingerprint="other"), "tokenizer", "other", "--model"),
    "block_size": (_identity(block_size=32), "4", "32", "--block-size"),
    "hash_version": (_identity(hash_version="9"), "1", "9", "the Quire version"),
    "arithmetic": (_identity(arithmetic="fixed"), "any", "fixed", "--deterministic"),
    "pooling": (_identity(pooling="mean"), "none", "mean", "--pooling"),
    "kv_geometry.num_layers": (_geometry(num_layers=7), "1", "7", "--model"),
    "kv_geometry.num_kv_heads": (_geometry(num_kv_heads=7), "1", "7", "--model"),
    "kv_geometry.head_dim_k": (_geometry(head_dim_k=7), "1", "7", "--model"),
    "kv_geometry.head_dim_v": (_geometry(head_dim_v=7), "1", "7", "--model"),
    "kv_geometry.dtype": (_geometry(dtype="bfloat16"), "float32", "bfloat16", "--dtype"),
    "kv_geometry.window": (_geometry(window=7), "0", "7", "--model"),
}


@pytest.mark.parametrize("part", OTHERS)
async def test_a_router_whose_pool_differs_in_any_part_is_refused(part: str) -> None:
    theirs, *words = OTHERS[part]
    async with served(InstantRunner()) as worker:
        error = await refused_stream(worker, pb.Hello(router_id="r", identity=identity_to_proto(theirs)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    said = error.details() or ""
    assert [word for word in (part, *words) if word not in said] == []
    assert said.count(";") == 0, "nothing else differs"


async def test_a_router_of_the_same_pool_is_served() -> None:
    async with served(InstantRunner()) as worker, worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r", identity=identity_to_proto(_identity()))))
        assert (await router.until("hello")).hello.info.worker_id == "w0"


# ------------------------------------------------------------ ends


async def test_a_running_sequence_ends_at_its_deadline_and_leaves_no_block() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 50, timeout_seconds=0.05))
        end = asyncio.create_task(router.until_finished(1))
        await worker.step_until(runner, lambda: end.done() and not runner.num_tokens)
        await end
        assert router.finished[1].reason == types.FINISH_REASON_DEADLINE
        await asyncio.to_thread(worker.driver.assert_all_free)


async def test_a_cancel_frees_the_blocks_once_the_steps_in_flight_have_ended() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 50))
        await asyncio.to_thread(runner.await_submissions, 2)
        await router.send(pb.StreamRequest(cancel=pb.Cancel(handle=1)))
        end = asyncio.create_task(router.until_finished(1))
        await worker.step_until(runner, lambda: end.done() and not runner.num_tokens)
        await end
        assert router.finished[1].reason == types.FINISH_REASON_CANCELLED
        await asyncio.to_thread(worker.driver.assert_all_free)


async def test_a_closed_stream_frees_the_blocks_of_all_its_sequences_waiting_ones_too() -> None:
    runner = ManualRunner()
    async with served(runner) as worker:
        async with worker.router() as router:
            await router.send(*(submit(handle, PROMPT, 9) for handle in range(1, 7)))  # four run at once
            await worker.until(lambda: worker.servicer.live_sequences == 6)
            await worker.until(lambda: len(runner.num_tokens) > 0)
        await worker.step_until(runner, lambda: not (worker.servicer.live_sequences or runner.num_tokens))
        await asyncio.to_thread(worker.driver.assert_all_free)


async def test_routers_get_the_output_of_their_own_sequences_only() -> None:
    runner = ManualRunner(lambda plan: plan.step)
    async with served(runner) as worker, worker.router() as first, worker.router() as second:
        await first.send(submit(1, PROMPT, 4), submit(2, PROMPT[:3], 8))
        await second.send(submit(1, PROMPT[:5], 6))
        ends = asyncio.gather(first.until_finished(1, 2), second.until_finished(1))
        await worker.step_until(runner, ends.done)
        await ends
    assert {handle: len(tokens) for handle, tokens in first.tokens.items()} == {1: 4, 2: 8}
    assert {handle: len(tokens) for handle, tokens in second.tokens.items()} == {1: 6}
    assert [first.finished[1].usage.prompt_tokens, second.finished[1].usage.prompt_tokens] == [11, 5]


async def test_one_router_that_goes_takes_nothing_from_the_other() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as stays:
        async with worker.router() as goes:
            await goes.send(submit(1, PROMPT, 40))
            await stays.send(submit(1, PROMPT, 8))
            await worker.until(lambda: worker.servicer.live_sequences == 2)
        end = asyncio.create_task(stays.until_finished(1))
        await worker.step_until(runner, lambda: end.done() and not runner.num_tokens)
        await end
        assert stays.finished[1].reason == types.FINISH_REASON_LENGTH
        assert len(stays.tokens[1]) == 8


# ------------------------------------------------------------ outputs


async def test_what_gathers_while_the_writer_is_busy_comes_as_one_message() -> None:
    runner = ManualRunner(lambda plan: plan.step)
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 8), submit(2, PROMPT[:3], 8))
        await worker.until(lambda: len(runner.num_tokens) == 2 and len(runner.submitted) == 2)
        # No await from here: the I/O loop, this test's own, stands still, while the engine's thread goes on.
        begun = runner.submissions
        for step in range(6):
            runner.step()
            runner.await_submissions(begun + step + 1)
        sizes: list[int] = []
        seqs: list[int] = []
        end = asyncio.create_task(_all_outputs(router, sizes, seqs))
        await worker.step_until(runner, end.done)
        await end
    assert max(sizes) >= 2 * 5, "the tokens of five steps at least in one message"
    assert seqs == list(range(1, len(seqs) + 1))
    assert [len(tokens) for tokens in router.tokens.values()] == [8, 8]
    assert all(tokens == sorted(set(tokens)) for tokens in router.tokens.values()), "in the order of the steps"


async def _all_outputs(router: RouterEnd, sizes: list[int], seqs: list[int]) -> None:
    while not router.finished.keys() >= {1, 2}:
        outputs = (await router.until("outputs")).outputs
        sizes.append(sum(unpack_u32(outputs.counts)))
        seqs.append(outputs.seq)


async def test_a_heartbeat_shows_the_age_of_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "HEARTBEAT_SECONDS", 0.02)
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 2))
        await asyncio.to_thread(runner.await_submissions, 1)
        ages: list[float] = []
        while len(ages) < 4:
            age = (await router.until("heartbeat")).heartbeat.load.step_age_seconds
            if ages or age > 0:  # the first ones may be older than the step
                ages.append(age)
        assert ages == sorted(set(ages))
        await worker.step_until(runner, lambda: worker.servicer.live_sequences == 0)
        await worker.until(lambda: worker.engine.load().step_age_seconds == 0)


async def test_logprobs_of_two_steps_that_ended_at_once_come_once() -> None:
    runner = ManualRunner()
    async with served(runner) as worker, worker.router() as router:
        await router.send(submit(5, PROMPT, 9))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        (sequence,) = runner.num_tokens
        both = (TokenLogprobs(7, -0.5, ()), TokenLogprobs(8, -0.25, ()))
        tokens = ((sequence, (7,)), (sequence, (8,)))
        worker.servicer.deliver(EngineOutputs(2, tokens=tokens, logprobs={sequence: both}))
        await router.until_sampled(5)
        assert router.tokens[5] == [one.token_id for one in router.logprobs[5]] == [7, 8]
        await worker.step_until(runner, lambda: worker.servicer.live_sequences == 0)


# ------------------------------------------------------------ a real model


@asynccontextmanager
async def llama() -> AsyncIterator[tuple[Served, RouterEnd]]:
    """Serve a tiny checkpoint with its real runner, in blocks of 4, to one router."""
    config = AgentConfig(SLOTS // 4, 4, max_num_batched_tokens=48, max_num_seqs=8)
    async with served(runner_on(transformers_model(checkpoint("llama")), 4), loaded=False, config=config) as worker:
        worker.serve(replace(LIMITS, max_model_len=256, vocab_size=VOCAB_SIZE))
        async with worker.router() as router:
            yield worker, router


async def test_the_tokens_of_a_real_model_come_whole_and_leave_nothing_behind() -> None:
    prompts = {1: PROMPT, 2: PROMPT[:5], 3: [*PROMPT, 7, 8, 9]}
    async with llama() as (worker, router):
        await router.send(*(submit(handle, prompt, 12) for handle, prompt in prompts.items()))
        await router.until_finished(*prompts)
        assert router.tokens == {handle: hf_greedy(checkpoint("llama"), each, 12) for handle, each in prompts.items()}
        await asyncio.to_thread(worker.driver.assert_all_free)


async def test_logprobs_come_with_the_handle_that_asked_for_them() -> None:
    asks = submit(2, PROMPT[:5], 6)
    asks.submit.sampling.logprobs = 2
    async with llama() as (_, router):
        await router.send(submit(1, PROMPT, 6), asks, submit(3, PROMPT[:7], 6))
        await router.until_finished(1, 2, 3)
    assert router.logprobs.keys() == {2}
    assert [one.token_id for one in router.logprobs[2]] == router.tokens[2]
    for one in router.logprobs[2]:
        assert len(one.top_token_ids) == len(one.top_logprobs) == 2
        assert one.top_token_ids[0] == one.token_id, "it is greedy"
        assert one.top_logprobs[0] == one.logprob <= 0.0


async def test_a_fork_shares_the_blocks_of_its_parent_and_draws_what_the_prompt_demands() -> None:
    """Two full blocks of the prompt's eleven tokens are shared, two slots of the third are copied, one is computed."""
    wanted = hf_greedy(checkpoint("llama"), PROMPT, 100)
    async with llama() as (worker, router):
        plans = recorded(worker)
        await router.send(submit(1, PROMPT, 100))
        await router.until_sampled(1)
        await router.send(submit(2, PROMPT, 100, index=1, fork_of=1))
        await router.until_finished(1, 2)
        await asyncio.to_thread(worker.driver.assert_all_free)
    assert router.tokens == {1: wanted, 2: wanted}
    assert router.admitted[2].cached_tokens == 8, "what is copied is not a hit"
    assert [copy.length for plan in plans for copy in plan.copies if isinstance(copy, Copy)] == [10]
    first = next(row for plan in plans for row in plan.rows if row.sequence == 2)
    assert (first.start, first.length) == (10, 1)


def recorded(worker: Served) -> list[StepPlan]:
    """Return the list to which every plan is added that the worker's runner gets from now on."""
    plans: list[StepPlan] = []
    submit_to_runner = worker.driver.runner.submit_step

    def record(plan: StepPlan) -> Future[StepResult]:
        plans.append(plan)
        return submit_to_runner(plan)

    worker.driver.runner.submit_step = record  # type: ignore[method-assign]
    return plans


async def test_a_fork_of_a_handle_that_nobody_knows_runs_all_the_same() -> None:
    async with llama() as (_, router):
        await router.send(submit(2, PROMPT, 4, fork_of=77))
        await router.until_finished(2)
    assert router.tokens[2] == hf_greedy(checkpoint("llama"), PROMPT, 4)


async def test_a_sequence_that_is_not_sampled_leaves_no_span() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, PROMPT, 3, traceparent=TRACED[:-1] + "0"), submit(2, PROMPT, 3))
        await router.until_finished(1, 2)
        assert worker.spans() == {}
