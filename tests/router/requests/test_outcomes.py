"""The record that ends a request: what it says of each way to end, and of each phase on the way."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from common.contracts.errors import DeadlineExceeded, QuireError
from common.contracts.types import DecisionKind, FinishReason, KvGroup, KvGroupKind
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.contracts.events import Admitted
from router.observe.diagnosis.causes import Cause
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.observe.diagnosis.request_history import RequestHistory, request_history
from router.observe.diagnosis.rules import diagnose, steps_of
from router.placement.admission import AdmissionLimits
from tests.support.router.fake_worker import IDENTITY, FakeWorker
from tests.support.router.frontend_harness import (
    CLOCK,
    FixedIndex,
    Harness,
    frontend_over,
    in_background,
    request,
    tokens_of,
)

GROUPS = (KvGroup(KvGroupKind.FULL, 0, 1, (0,)), KvGroup(KvGroupKind.WINDOW, 8, 1, (1,)))


def history(harness: Harness, request_id: str = "r1") -> RequestHistory:
    return request_history(request_id, harness.decisions.find(request_id))


def outcome(harness: Harness, request_id: str = "r1") -> Outcome:
    (record,) = harness.decisions.find(request_id, kind=DecisionKind.OUTCOME)
    return outcome_of(record)


async def test_a_request_that_ends_by_itself_has_all_its_seconds_in_phases() -> None:
    async with frontend_over(FakeWorker(automatic=True), index=FixedIndex({})) as harness:
        began = CLOCK.monotonic()
        await harness.events(request(prompt=10, request_id="r1"))
        took = CLOCK.monotonic() - began
        found = outcome(harness)
    assert (found.ended, found.failure, found.worker, found.miss) == ("length", "", "w0", "never_seen")
    assert (found.prompt_tokens, found.output_tokens, found.block_size) == (10, 3, 4)
    assert (found.admissions, found.placements, found.preemptions, found.moves) == (1, 1, 0, 0)
    assert (found.has_first_token, found.queued, found.index_answered) == (True, False, True)
    assert 0.0 < found.first_token_s <= found.total_s <= took
    assert {name for name, _ in found.before} >= {"blocks", "prefill"}


@pytest.mark.parametrize("groups", [(), GROUPS])
async def test_an_outcome_says_whether_its_pool_counts_pages(groups: tuple[KvGroup, ...]) -> None:
    identity = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, groups=groups))
    async with frontend_over(FakeWorker(identity=identity, automatic=True), index=FixedIndex({})) as harness:
        await harness.events(request(prompt=10, request_id="r1"))
        assert outcome(harness).counts_pages is bool(groups)


async def test_what_the_client_was_told_stands_in_the_story() -> None:
    async with frontend_over(FakeWorker(automatic=True), index=FixedIndex({})) as harness:
        await harness.events(
            replace(request(prompt=10, request_id="r1"), notes=("an image is left out", "so is a tool"))
        )
        told = [step.sentence for step in steps_of(history(harness)) if step.sentence.startswith("tells the client")]
    assert told == ["tells the client: an image is left out", "tells the client: so is a tool"]


async def test_what_the_worker_computed_first_is_no_prefill_of_the_request() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(request_id="r1")) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step(admitted={1: 0})
        ahead = pb.SequenceStarted(handle=1, wait_seconds=1e9, ahead_tokens=3000, ahead_of="huge")
        worker.step({1: [1]}, started=[ahead])
        worker.step({1: [2]}, finished={1: FinishReason.LENGTH})
        await task
        found = outcome(harness)
        assert (found.started, found.ahead_tokens, found.ahead_of) == (True, 3000, "huge")
        assert "prefill_wait" in dict(found.before)


async def test_a_corrected_number_of_cached_tokens_is_no_second_admission() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(request_id="r1")) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step(admitted={1: 8})
        worker.step({1: [1]}, recounted={1: 4})
        worker.step({1: [2]}, finished={1: FinishReason.LENGTH})
        await task
        found = outcome(harness)
        assert (found.admissions, found.cached_tokens) == (1, 4)


async def test_preemptions_and_moves_are_phases_until_the_next_token() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(request_id="r1")) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [1]}, admitted={1: 0})
        # The last tokens come in one message with the loss; the client takes them, and the wait goes on.
        worker.step({1: [2]}, preempted=(1).to_bytes(4, "little"))
        await harness.until(lambda: tokens_of(harness.seen) == [1, 2])
        began = CLOCK.monotonic()
        while CLOCK.monotonic() - began < 0.02:
            pass
        worker.step(admitted={1: 0})
        worker.step({1: [3]}, finished={1: FinishReason.LENGTH})
        await task
        found = outcome(harness)
        assert (found.preemptions, found.admissions) == (1, 2)
        assert dict(found.after)["preempted"] >= 0.02


async def test_a_lost_worker_counts_as_a_move_and_names_both() -> None:
    first, second = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(first, second) as harness:
        second.automatic = False
        async with in_background(harness, request(request_id="r1")) as task:
            await harness.until(lambda: bool(first.submits or second.submits))
            lost, other = (first, second) if first.submits else (second, first)
            other.automatic = True
            lost.step({1: [100]}, admitted={1: 0})
            await harness.until(lambda: bool(harness.seen))
            await lost.kill()
            await task
        found = outcome(harness)
        assert (found.moves, found.placements, found.worker) == (1, 2, other.worker_id)
        assert "moved" in dict(found.after)


async def test_a_worker_that_is_lost_before_its_grant_has_all_seconds_until_the_next_placement() -> None:
    first, second = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(first, second) as harness, in_background(harness, request(request_id="r1")) as task:
        await harness.until(lambda: bool(first.submits or second.submits))
        lost, other = (first, second) if first.submits else (second, first)
        began = CLOCK.monotonic()
        while CLOCK.monotonic() - began < 0.02:
            pass
        await lost.kill()
        await other.until(lambda: bool(other.submits))
        other.step(admitted={1: 0})
        other.step({1: [1, 2, 3]}, finished={1: FinishReason.LENGTH})
        await task
        found = dict(outcome(harness).before)
        assert found["moved"] >= 0.02
        assert "prefill" in found, "at the other worker the request begins anew"
        assert f"it lost {lost.worker_id} (" in diagnose(history(harness)).verdict.sentence


async def test_what_held_a_sequence_up_at_its_worker_is_taken_from_the_phase_that_it_was_in() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(request_id="r1")) as task:
        await worker.until(lambda: bool(worker.submits))
        waited = pb.SequenceDelayed(handle=1, compile_seconds=0.0001, manager_away_seconds=0.0001)
        worker.step(admitted={1: 0}, delayed=[waited])
        worker.step(delayed=[pb.SequenceDelayed(handle=1, stalled_seconds=0.0001)])
        worker.step({1: [1]})
        await harness.until(lambda: tokens_of(harness.seen) == [1])
        stalled = pb.SequenceDelayed(handle=1, stalled_seconds=1e9, manager_away_seconds=0.0001)
        worker.step({1: [2, 3]}, finished={1: FinishReason.LENGTH}, delayed=[stalled])
        await task
        before, after = dict(outcome(harness).before), dict(outcome(harness).after)
    assert (before["constraint"], before["manager_away"], before["stalled"]) == pytest.approx((0.0001,) * 3)
    assert after["manager_away"] == pytest.approx(0.0001)
    assert after["stalled"] > 0.0, "more than the phase had is not taken"


async def test_a_worker_that_puts_out_nothing_until_the_end_is_no_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.run_log._SILENT_S", 0.01)
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        async with in_background(harness, request(request_id="r1")):
            await worker.until(lambda: bool(worker.submits))
            worker.step({1: [1]}, admitted={1: 0})
            await harness.until(lambda: tokens_of(harness.seen) == [1])
            began = CLOCK.monotonic()
            while CLOCK.monotonic() - began < 0.02:
                pass
        assert dict(outcome(harness).after)["silent"] >= 0.02


async def test_sequences_that_wait_at_once_were_held_up_once() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(n=2, request_id="r1")) as task:
        await worker.until(lambda: len(worker.submits) == 2)
        away = [pb.SequenceDelayed(handle=each, manager_away_seconds=each * 0.0001) for each in (1, 2)]
        worker.step(admitted={1: 0, 2: 0}, delayed=away)
        late = pb.SequenceDelayed(handle=2, manager_away_seconds=1e9)
        worker.step({1: [1]}, delayed=[late])
        worker.step({1: [2, 3], 2: [1, 2, 3]}, finished={1: FinishReason.LENGTH, 2: FinishReason.LENGTH})
        await task
        assert dict(outcome(harness).before)["manager_away"] == pytest.approx(0.0002)


async def test_requests_of_a_higher_priority_that_go_first_are_counted() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request(request_id="low", priority=-1)) as low:
            await harness.until(lambda: bool(harness.decisions.find("low", kind=DecisionKind.QUEUED)))
            async with in_background(harness, request(request_id="high", priority=1)) as high:
                await harness.until(lambda: bool(harness.decisions.find("high", kind=DecisionKind.QUEUED)))
                worker.step({1: [1]}, admitted={1: 0, 2: 0}, finished={1: FinishReason.LENGTH})
                await worker.until(lambda: len(worker.submits) == 3)
                worker.step({3: [1, 2, 3]}, admitted={3: 0}, finished={3: FinishReason.LENGTH})
                await high
            await worker.until(lambda: len(worker.submits) == 4)
            worker.step({4: [1, 2, 3]}, admitted={4: 0}, finished={4: FinishReason.LENGTH})
            await low
        assert (outcome(harness, "low").passed_by, outcome(harness, "high").passed_by) == (1, 0)


async def test_what_the_router_took_to_compile_a_constraint_is_no_work_of_its_own() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        arrived = CLOCK.monotonic() - 2.0
        asked = replace(request(prompt=10, request_id="r1"), arrived=arrived, constraint_seconds=1.5)
        await harness.events(asked)
        assert dict(outcome(harness).before)["constraint"] == 1.5


async def test_tokens_that_an_earlier_prompt_shares_are_noted_in_its_domain_alone() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        await harness.events(request(prompt=10, request_id="r1", cache_domain=b"red"))
        await harness.events(request(prompt=7, request_id="r2", cache_domain=b"red"))
        await harness.events(request(prompt=7, request_id="r3", cache_domain=b"blue"))
        assert [outcome(harness, each).shared_tokens for each in ("r1", "r2", "r3")] == [0, 7, 0]


async def test_a_wait_for_a_worker_is_recorded_with_the_reason_of_each() -> None:
    worker = FakeWorker(max_num_seqs=1)
    index = FixedIndex({"w0": 2})
    async with frontend_over(worker, index=index) as harness, in_background(harness, request(n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request(request_id="r1")) as task:
            await harness.until(lambda: bool(harness.decisions.find("r1", kind=DecisionKind.QUEUED)))
            (record,) = harness.decisions.find("r1", kind=DecisionKind.QUEUED)
            assert [each.figures for each in record.candidates] == [()], "hits are those of the queue's head"
            (queued,) = history(harness).queued
            assert (queued.workers, queued.ahead) == ((("w0", "over limit: 2 sequences of at most 2"),), 0)
            worker.step({1: [1]}, admitted={1: 0, 2: 0}, finished={1: FinishReason.LENGTH})
            await worker.until(lambda: len(worker.submits) == 3)
            worker.step({3: [1]}, admitted={3: 0}, finished={3: FinishReason.LENGTH})
            await task
        assert outcome(harness).queued


async def test_an_index_that_does_not_answer_is_noted() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        await harness.events(request(prompt=10, request_id="r1"))
        await harness.events(request(prompt=3, request_id="r2"))
        assert not outcome(harness, "r1").index_answered
        assert outcome(harness, "r2").index_answered  # it has no block to look up


async def test_a_prompt_that_another_domain_sent_is_noted() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        await harness.events(request(prompt=10, request_id="r1", cache_domain=b"red"))
        await harness.events(request(prompt=10, request_id="r2", cache_domain=b"blue"))
        assert outcome(harness, "r1").other_domain_tokens == 0
        found = outcome(harness, "r2")
        assert (found.other_domain_tokens, found.other_domain) == (8, "of tenant ")


@pytest.mark.parametrize(("seconds", "cause"), [(-1.0, Cause.DEADLINE), (1e-9, Cause.DEADLINE)])
async def test_a_deadline_is_the_end_in_the_record(seconds: float, cause: Cause) -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        with pytest.raises(DeadlineExceeded):
            await harness.events(request(request_id="r1", deadline=CLOCK.monotonic() + seconds))
        assert outcome(harness).ended == "DEADLINE_EXCEEDED"
        assert diagnose(history(harness)).verdict.cause is cause


async def test_a_client_that_leaves_and_a_call_that_aborts_are_told_apart() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        async with in_background(harness, request(request_id="r1")):
            await worker.until(lambda: bool(worker.submits))
        assert diagnose(history(harness)).verdict.cause is Cause.CLIENT_GONE
        async with in_background(harness, request(request_id="r2")) as task:
            await worker.until(lambda: len(worker.submits) == 2)
            assert harness.frontend.abort_request("r2") == 1
            with pytest.raises(QuireError):
                await task
        assert diagnose(history(harness, "r2")).verdict.cause is Cause.ABORTED


async def test_a_refusal_has_the_numbers_in_words() -> None:
    async with frontend_over(FakeWorker(), limits=AdmissionLimits(max_tokens_in_flight=5)) as harness:
        with pytest.raises(QuireError):
            await harness.events(request(request_id="r1"))
        verdict = diagnose(history(harness)).verdict
    assert verdict.sentence == (
        "Refused at once by the limit router.tokens_in_flight: 0 tokens in flight and 13 more requested; at most 5."
    )


async def test_an_event_that_the_client_leaves_unread_is_timed() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        async with aclosing(harness.frontend.generate(request(request_id="r1"))) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    began = CLOCK.monotonic()
                    while CLOCK.monotonic() - began < 0.01:
                        pass
        assert outcome(harness).client_longest >= 0.01
