"""Sequences whose worker dies, fails, hangs or leaves go on at another one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from common.contracts.errors import EngineFailure, InvalidRequest, Unavailable
from common.contracts.hashing import block_digests, little_endian_int32, root_digest
from common.contracts.types import FinishReason
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.contracts.events import Admitted, PromptLogprobs
from tests.support.router.fake_worker import IDENTITY, FakeWorker, prompt_of
from tests.support.router.frontend_harness import (
    FixedIndex,
    ends_of,
    frontend_over,
    in_background,
    request,
    text_of,
    tokens_of,
    until_nothing_left,
)


async def test_a_sequence_whose_worker_dies_goes_on_at_another_without_losing_or_repeating_a_token() -> None:
    dying, other = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(dying) as harness, in_background(harness, request(max_tokens=6, logprobs=None)) as task:
        await dying.until(lambda: bool(dying.submits))
        dying.step({1: [100, 101]}, admitted={1: 4})
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await dying.kill()
        events = await task
        assert tokens_of(events) == [100, 101, 102, 103, 104, 105]
        assert text_of(events) == "<100><101><102><103><104><105>."
        (submit,) = other.submits
        assert prompt_of(submit) == [*range(1, 11), 100, 101]
        assert (submit.output_tokens_before, submit.sampling.max_tokens) == (2, 6)
        assert len(submit.block_hashes) == 16 * 3
        end = ends_of(events)[0]
        assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.output_tokens) == (10, 4, 6)
        assert end.usage.recomputed_tokens == 12
        assert sum(isinstance(event, Admitted) for event in events) == 1
        (move,) = harness.decisions.find(kind="migration")
        assert move.chosen == "w1"
        await until_nothing_left(harness)
        await other.kill()


def _scores(first: int, count: int) -> list[types_pb2.TokenLogprobs]:
    return [types_pb2.TokenLogprobs(token_id=first + n, logprob=-1.0, rank=1) for n in range(count)]


async def test_log_probabilities_of_a_prompt_go_on_where_the_lost_worker_ended() -> None:
    dying, other = FakeWorker("w0"), FakeWorker("w1")
    wanted = request(prompt=10, max_tokens=2, prompt_logprobs=0)
    async with frontend_over(dying) as harness, in_background(harness, wanted) as task:
        await dying.until(lambda: bool(dying.submits))
        assert dying.submits[0].prompt_logprobs_before == 0
        dying.step(admitted={1: 0})
        dying.step(prompt_logprobs=_scores(2, 4), prompt_logprob_handles=little_endian_int32([1] * 4))
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await dying.kill()
        await other.until(lambda: bool(other.submits))
        (submit,) = other.submits
        assert (submit.prompt_logprobs_before, submit.sampling.prompt_logprobs) == (4, 0)
        handle = submit.handle
        owners = little_endian_int32([handle] * 5)
        other.step(admitted={handle: 0}, prompt_logprobs=_scores(6, 5), prompt_logprob_handles=owners)
        other.step({handle: [100, 101]}, finished={handle: FinishReason.LENGTH})
        events = await task
        scored = [entry for event in events if isinstance(event, PromptLogprobs) for entry in event.logprobs]
        assert [entry.token_id for entry in scored] == list(range(2, 11))
        assert tokens_of(events) == [100, 101]
        await other.kill()


async def test_only_the_first_sequence_of_a_request_scores_the_prompt_and_none_asks_the_index() -> None:
    worker, index = FakeWorker(automatic=True), FixedIndex({"w0": 2})
    async with frontend_over(worker, index=index) as harness:
        await harness.events(request(prompt=10, n=3, max_tokens=1, prompt_logprobs=5))
        assert [submit.prompt_logprobs_before for submit in worker.submits] == [0, 9, 9]
        assert index.asked == []
        await harness.events(request(prompt=10, max_tokens=1))
        assert len(index.asked) == 1


async def test_the_only_worker_is_waited_for_and_used_again() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)) as task:
        await worker.until(lambda: len(worker.submits) == 2)
        worker.step({1: [100], 2: [100]}, admitted={1: 0, 2: 0})
        worker.automatic = True
        await worker.restart()
        events = await task
        assert [tokens_of(events, index) for index in (0, 1)] == [[100, 101, 102]] * 2
        await until_nothing_left(harness)


async def test_blocks_granted_again_after_a_preemption_are_no_move() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request()) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [100]}, admitted={1: 4})
        worker.step(preempted=b"\1\0\0\0")
        usage = types_pb2.Usage(recomputed_tokens=7, preemptions=1)
        reason = types_pb2.FinishReason.FINISH_REASON_LENGTH
        worker.step(admitted={1: 8}, ended=[pb.SequenceFinished(handle=1, reason=reason, usage=usage)])
        end = ends_of(await task)[0]
        assert (end.usage.cached_tokens, end.usage.recomputed_tokens, end.usage.preemptions) == (4, 7, 1)


async def test_a_failed_step_moves_the_sequence() -> None:
    failing, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(failing, other) as harness, in_background(harness, request(max_tokens=2)) as task:
        taken: list[FakeWorker] = []
        for token, reason in ((100, FinishReason.ERROR), (101, FinishReason.LENGTH)):
            await harness.until(lambda: len(failing.submits) + len(other.submits) > len(taken))
            taker = next(each for each in (failing, other) if len(each.submits) > taken.count(each))
            taken.append(taker)
            handle = taker.submits[-1].handle
            taker.step({handle: [token]}, admitted={handle: 0}, finished={handle: reason})
        assert tokens_of(await task) == [100, 101]


async def test_a_request_that_no_worker_can_follow_is_not_moved() -> None:
    failing, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(failing, other) as harness, in_background(harness, request(max_tokens=2)) as task:
        await harness.until(lambda: bool(failing.submits or other.submits))
        taker = failing if failing.submits else other
        handle = taker.submits[-1].handle
        taker.step({handle: [100]}, {handle: 0}, {handle: FinishReason.ERROR}, wrong_field="json_schema")
        with pytest.raises(InvalidRequest, match="json_schema"):
            await task
        assert len(failing.submits) + len(other.submits) == 1
        assert harness.registry.get_sample_value("quire:migrations_total") == 0


async def test_a_worker_that_is_removed_loses_its_sequences_to_another() -> None:
    leaving, staying = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(leaving) as harness, in_background(harness, request()) as task:
        await leaving.until(lambda: bool(leaving.submits))
        await staying.start()
        harness.pool.add_worker(staying.address)
        await harness.connected(2)
        harness.pool.remove(leaving.address)
        assert tokens_of(await task) == [100, 101, 102]
        assert [model.worker_id for model in harness.pool.models()] == ["w1"]
        await staying.kill()


async def test_all_workers_may_be_replaced_by_another_kind() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request())
        await worker.kill()
        await harness.connected(0)
        worker.identity = replace(IDENTITY, model_fingerprint="n" * 32)
        await worker.restart()
        await harness.connected(1)
        await harness.events(request(prompt=4))
        root = root_digest("n" * 32, IDENTITY.tokenizer_fingerprint, 4)
        assert worker.submits[-1].parent_digest == block_digests(root, [1, 2, 3, 4], 4)[0]


async def test_a_request_that_fails_everywhere_is_given_up() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request()) as task:
        for attempt in range(1, 3):
            await worker.until(lambda attempt=attempt: len(worker.submits) == attempt)  # type: ignore[misc]
            worker.step(finished={worker.submits[-1].handle: FinishReason.ERROR})
        with pytest.raises(EngineFailure, match="2 workers broke with this request, which got no further"):
            await task
        await until_nothing_left(harness)


async def test_a_request_that_gets_further_everywhere_and_never_its_last_token_is_given_up() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(max_tokens=19)) as task:
        for attempt in range(1, 5):
            await worker.until(lambda attempt=attempt: len(worker.submits) == attempt)  # type: ignore[misc]
            handle = worker.submits[-1].handle
            worker.step({handle: [7] * attempt}, finished={handle: FinishReason.ERROR})
        with pytest.raises(EngineFailure, match="lost 4 workers"):
            await task
        await until_nothing_left(harness)


async def test_a_hung_worker_loses_its_sequences_to_another() -> None:
    hung, other = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(hung) as harness, in_background(harness, request()) as task:
        await hung.until(lambda: bool(hung.submits))
        hung.step({1: [100]}, admitted={1: 0})
        hung.heartbeat(step_age_seconds=6.0, step_predicted_seconds=0.01)
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await harness.until(lambda: harness.pool.models()[0].load.step_age_seconds > 0)
        harness.pool.check()
        assert tokens_of(await task) == [100, 101, 102]
        await hung.until(lambda: bool(hung.cancels))
        await other.kill()


async def test_a_hung_worker_keeps_its_sequences_while_there_is_no_other() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(max_tokens=1)) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.heartbeat(step_age_seconds=6.0, step_predicted_seconds=0.01)
        await harness.until(lambda: harness.pool.models()[0].load.step_age_seconds > 0)
        harness.pool.check()
        worker.step({1: [100]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100]


async def test_a_worker_that_is_not_there_yet_is_told_once_and_one_that_was_lost_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.workers.pool")
    worker = FakeWorker(greets=False)
    async with frontend_over() as harness:
        await worker.start()
        worker.refuses = Unavailable("the worker is loading its model")
        harness.pool.add_worker(worker.address)
        await worker.until(lambda: len(worker.hellos) >= 3)
        worker.refuses, worker.greets = None, True
        await harness.connected(1)
        await worker.kill()
        await harness.connected(0)
    said = [(record.levelname, getattr(record, "reason", "")) for record in caplog.records]
    assert said[:2] == [("INFO", "the worker is loading its model"), ("INFO", "")]
    assert [level for level, _ in said[2:]][:1] == ["WARNING"]
