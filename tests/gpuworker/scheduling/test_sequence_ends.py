"""How sequences end: stop rules, cancels, preemptions, with and without steps in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.contracts.errors import AlreadyExists, InvalidRequest
from common.contracts.lease import GrantBatch
from common.contracts.types import FinishReason, SequenceId, SequencePhase
from gpuworker.scheduling.batch_plan import StepResult
from gpuworker.scheduling.stopping import FinishCause, StopRule
from tests.support.gpuworker.agent_harness import EOS, Driver, keys

ONE = SequenceId(0)


def running(**config: int) -> Driver:
    worker = Driver(**config)
    worker.submit(0, range(6), max_tokens=8)
    worker.admit(0, [0, 1])
    worker.lease([2, 3])
    worker.agent.take_report()
    return worker


@pytest.mark.parametrize(
    ("token", "output", "length", "expected"),
    [
        (7, 1, 5, FinishCause(FinishReason.STOP, 7)),
        (8, 1, 5, FinishCause(FinishReason.STOP, 8)),
        (9, 1, 5, None),
        (9, 6, 10, FinishCause(FinishReason.LENGTH)),
        (7, 6, 10, FinishCause(FinishReason.STOP, 7)),
    ],
)
def test_stop_tokens_and_limits(token: int, output: int, length: int, expected: FinishCause | None) -> None:
    rule = StopRule(max_tokens=6, eos_ids=frozenset({7}), stop_token_ids=frozenset({8}))
    assert rule.ending(token, output, length, limit=10) == expected


def test_ignore_eos_leaves_the_requests_own_stop_tokens() -> None:
    rule = StopRule(max_tokens=6, eos_ids=frozenset({7}), stop_token_ids=frozenset({8}), ignore_eos=True)
    assert rule.ending(7, 1, 5, limit=10) is None
    assert rule.ending(8, 1, 5, limit=10) == FinishCause(FinishReason.STOP, 8)


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    rule = StopRule(max_tokens=6, min_tokens=3, eos_ids=frozenset({7}))
    assert [rule.ending(7, output, 4 + output, limit=10) is not None for output in (1, 2, 3)] == [False, False, True]


def test_the_limit_is_the_smaller_of_max_tokens_and_max_len() -> None:
    rule = StopRule(max_tokens=6)
    assert rule.limit(prompt_tokens=10, max_len=100) == 16
    assert rule.limit(prompt_tokens=10, max_len=12) == 12


def test_a_finish_is_delivered_at_once_and_the_row_goes_with_its_last_step() -> None:
    worker = running()
    first, second = worker.plan(), worker.plan()
    done = worker.complete(first, EOS)
    assert done.tokens == {0: (EOS,)}
    assert [(f.reason, f.stop_token) for f in done.finished] == [(FinishReason.STOP, EOS)]
    assert done.forgotten == ()
    report = worker.agent.take_report()
    assert report is not None
    assert report.finished == (), "a step in flight still writes the row"
    done = worker.complete(second)
    assert (done.tokens, done.forgotten) == ({}, (0,))
    report = worker.agent.take_report()
    assert report is not None
    assert report.finished == ((0, FinishReason.STOP),)
    assert not worker.agent.has_work


def test_behaviour_10_nothing_past_a_stop_is_sealed() -> None:
    worker = Driver()
    worker.submit(0, range(7), max_tokens=8)
    worker.admit(0, [0, 1])
    first, second = worker.plan(), worker.plan()  # the second writes slot 7, the token that the first is drawing
    worker.agent.cancel_sequence(ONE)
    worker.complete(first)
    worker.complete(second)
    report = worker.agent.take_report()
    assert report is not None
    assert report.seal == ((0, keys(range(4), 4)[0]),), "slot 7 holds a token that was never accepted"


def test_a_block_that_ends_with_the_stop_token_is_sealed() -> None:
    worker = Driver()
    worker.submit(0, range(7), max_tokens=8)
    worker.admit(0, [0, 1])
    first, second = worker.plan(), worker.plan()
    worker.complete(first, EOS)
    worker.complete(second)
    report = worker.agent.take_report()
    assert report is not None
    expected = keys([*range(7), EOS], 4)
    assert report.seal == ((0, expected[0]), (1, expected[1]))


def test_behaviour_17_a_sequence_released_before_its_prefill_ran_publishes_nothing() -> None:
    worker = running()
    worker.agent.cancel_sequence(ONE)
    assert worker.agent.departures().forgotten == (0,)
    report = worker.agent.take_report()
    assert report is not None
    assert (report.seal, report.finished) == ((), ((0, FinishReason.CANCELLED),))


def test_behaviour_24_a_preempted_sequence_keeps_its_in_flight_token_and_goes_on_from_it() -> None:
    worker = running()
    first, second = worker.plan(), worker.plan()
    worker.preempt(0)
    assert worker.agent.plan() is None
    assert worker.complete(first, 50).tokens == {0: (50,)}
    done = worker.complete(second, 51)
    assert (done.tokens, done.preempted, done.forgotten) == ({0: (51,)}, (0,), (0,))
    report = worker.agent.take_report()
    assert report is not None
    assert report.preempted == ((0, 8),)
    (again,) = worker.agent.inventory().sequences
    assert again.preemptions == 1
    worker.agent.attached(0)
    worker.admit(0, [4, 5])
    assert worker.agent.tokens_of(ONE) == (0, 1, 2, 3, 4, 5, 50, 51)
    assert worker.rows() == [(0, 0, 8, (4, 5), True)]


def test_behaviour_24_the_chain_of_a_requeued_sequence_covers_generated_blocks() -> None:
    worker = running()
    worker.step(50)
    worker.step(51)
    worker.preempt(0)
    inventory = worker.agent.inventory()
    assert inventory.sequences[0].reserve.block_hashes == keys([0, 1, 2, 3, 4, 5, 50, 51], 4)
    assert inventory.sequences[0].phase is SequencePhase.WAITING


def test_behaviour_24_a_finish_found_while_a_preemption_drains_wins() -> None:
    worker = running()
    first, second = worker.plan(), worker.plan()
    worker.preempt(0)
    worker.complete(first, EOS)
    done = worker.complete(second)
    assert (done.preempted, done.forgotten) == ((), (0,))
    report = worker.agent.take_report()
    assert report is not None
    assert (report.preempted, report.finished) == ((), ((0, FinishReason.STOP),))


def waiting(worker: Driver) -> None:
    worker.submit(0, range(6))


def admitted(worker: Driver) -> None:
    waiting(worker)
    worker.admit(0, [0, 1])


def mid_chunk(worker: Driver) -> None:
    admitted(worker)
    worker.plan()


def decoding(worker: Driver) -> None:
    admitted(worker)
    worker.step()
    worker.step()
    worker.step()
    worker.plan()


def draining_preempt(worker: Driver) -> None:
    decoding(worker)
    worker.preempt(0)


def preempted(worker: Driver) -> None:
    admitted(worker)
    worker.step()
    worker.preempt(0)


@pytest.mark.parametrize("reach", [waiting, admitted, mid_chunk, decoding, draining_preempt, preempted])
def test_behaviour_28_a_cancel_is_idempotent_in_every_phase(reach: Callable[[Driver], None]) -> None:
    worker = Driver(max_num_batched_tokens=4)
    reach(worker)
    worker.agent.take_report()
    finished = 0
    for _ in range(2):
        worker.agent.cancel_sequence(ONE, FinishReason.DEADLINE)
        finished += len(worker.agent.departures().finished)
    while worker.agent.steps_in_flight:
        plan = worker.agent._in_flight[0]
        done = worker.complete(plan)
        finished += len(done.finished)
        assert done.tokens == {}, "a late token of an ended sequence is dropped"
    assert finished == 1
    assert not worker.agent.has_work
    report = worker.agent.take_report()
    assert report is not None
    assert report.finished == ((0, FinishReason.DEADLINE),)
    assert worker.agent.inventory().sequences == ()


def test_behaviour_28_orders_for_unknown_sequences_do_nothing() -> None:
    worker = Driver()
    worker.agent.cancel_sequence(SequenceId(7))
    worker.agent.apply_grant(GrantBatch(0, cancel=(SequenceId(8),)))
    applied = worker.preempt(9)
    assert applied.preempting == ()
    worker.agent.check_invariants()


def test_behaviour_29_recomputed_tokens_are_counted_apart_from_hits() -> None:
    worker = running()
    worker.step()
    worker.step()
    worker.preempt(0)  # positions 0..6 are computed, 8 tokens are known
    worker.admit(0, [0, 4], shared=1)
    worker.step()
    usage = worker.agent.usage(ONE)
    assert (usage.cached_tokens, usage.recomputed_tokens, usage.preemptions) == (0, 3, 1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_step_that_ends_a_sequence_counts_what_it_computes_again(max_tokens: int) -> None:
    """A prompt of 12 of which 8 tokens were computed; its last step computes 4 of these, and 4 for the first time."""
    worker = Driver(max_num_batched_tokens=8)
    worker.submit(0, range(12), max_tokens=max_tokens)
    worker.admit(0, [0, 1, 2])
    worker.step()
    worker.preempt(0)
    worker.admit(0, [0, 3, 4], shared=1)
    (end,) = worker.step().finished
    usage = end.usage
    assert (usage.output_tokens, usage.cached_tokens, usage.recomputed_tokens) == (max_tokens, 0, 4)


def test_a_failure_counts_what_its_step_computed_again() -> None:
    worker = Driver(max_num_batched_tokens=8)
    worker.submit(0, range(12))
    worker.admit(0, [0, 1, 2])
    worker.step()
    worker.preempt(0)
    worker.admit(0, [0, 3, 4], shared=1)
    failed = StepResult(worker.plan().step, {ONE: (50,)}, ended={ONE: FinishCause(FinishReason.ERROR)})
    (end,) = worker.agent.complete(failed).finished
    assert end.usage.recomputed_tokens == 4


def test_behaviour_26_a_sequence_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    worker = Driver(num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match=r"18 tokens \(prompt 13\) need 5 blocks of 4; the worker has 4"):
        worker.submit(0, range(13), max_tokens=5)
    worker.submit(1, range(13), max_tokens=4)
    assert worker.agent.counts().waiting == 1


def test_a_prompt_needs_a_token_and_room_to_draw_one() -> None:
    worker = Driver()
    with pytest.raises(InvalidRequest, match="0 tokens"):
        worker.submit(0, [])
    with pytest.raises(InvalidRequest, match="5 tokens, with room for 4"):
        worker.submit(0, range(5), max_tokens=-1)


def test_without_output_a_sequence_ends_with_its_prompt_computed_and_sealed() -> None:
    worker = Driver()
    one = worker.submit(0, range(8), max_tokens=0)
    worker.admit(0, [5, 2])
    plan = worker.plan()
    assert [(row.start, row.length, row.samples) for row in plan.rows] == [(0, 8, False)]
    assert worker.agent.plan() is None
    completion = worker.complete(plan)
    assert (completion.tokens, completion.forgotten) == ({}, (one,))
    (end,) = completion.finished
    assert (end.reason, end.usage.output_tokens, end.usage.prompt_tokens) == (FinishReason.LENGTH, 0, 8)
    report = worker.agent.take_report()
    assert report is not None
    assert [block for block, _ in report.seal] == [5, 2]


def test_without_output_a_prompt_in_chunks_ends_after_its_last_one() -> None:
    worker = Driver(max_num_batched_tokens=3)
    worker.submit(0, range(5), max_tokens=0)
    worker.admit(0, [5, 2])
    first, second = worker.plan(), worker.plan()
    assert worker.complete(first).finished == ()
    assert [end.reason for end in worker.complete(second).finished] == [FinishReason.LENGTH]


def test_sequence_ids_rise() -> None:
    worker = Driver()
    worker.submit(3, range(4))
    with pytest.raises(AlreadyExists):
        worker.submit(3, range(4))


COMPLETE = FinishCause(FinishReason.STOP)


def test_what_a_step_drew_behind_the_end_is_nothing() -> None:
    worker = running()
    worker.step()
    plan = worker.plan()
    completion = worker.agent.complete(StepResult(plan.step, {ONE: (51,)}, ended={ONE: COMPLETE}))
    worker.agent.check_invariants()
    assert completion.tokens == {}
    (end,) = completion.finished
    assert (end.reason, end.stop_token, end.usage.output_tokens) == (FinishReason.STOP, None, 1)
    assert completion.forgotten == (ONE,)


def test_an_end_with_an_error_says_its_words() -> None:
    worker = running()
    plan = worker.plan()
    ending = FinishCause(FinishReason.ERROR, message="it cannot be followed")
    (end,) = worker.agent.complete(StepResult(plan.step, {ONE: (51,)}, ended={ONE: ending})).finished
    assert (end.reason, end.message) == (FinishReason.ERROR, "it cannot be followed")


def test_a_sequence_that_was_cancelled_meanwhile_does_not_end_twice() -> None:
    worker = running()
    plan = worker.plan()
    worker.agent.cancel_sequence(ONE)
    (end,) = worker.agent.complete(StepResult(plan.step, {ONE: (51,)}, ended={ONE: COMPLETE})).finished
    assert end.reason is FinishReason.CANCELLED


def test_a_preempted_sequence_that_had_ended_does_not_wait_again() -> None:
    worker = running()
    plan = worker.plan()
    worker.preempt(0)
    completion = worker.agent.complete(StepResult(plan.step, {ONE: (51,)}, ended={ONE: COMPLETE}))
    worker.agent.check_invariants()
    assert (completion.preempted, completion.forgotten) == ((), (ONE,))
    assert not worker.agent.has_work


def test_a_sequence_that_is_handed_over_ends_behind_the_tokens_of_both_steps_in_flight() -> None:
    worker = running()
    first, second = worker.plan(), worker.plan()
    worker.agent.hand_over(ONE)
    worker.agent.hand_over(ONE)
    assert worker.agent.departures().finished == ()
    assert worker.agent.plan() is None, "it is in no later plan"
    done = worker.complete(first, 3)
    assert (done.tokens, done.finished) == ({0: (3,)}, ())
    done = worker.complete(second, 4)
    assert done.tokens == {0: (4,)}
    (end,) = done.finished
    assert (end.reason, end.usage.output_tokens, done.forgotten) == (FinishReason.CANCELLED, 2, (0,))
    report = worker.agent.take_report()
    assert report is not None
    assert report.finished == ((0, FinishReason.CANCELLED),)
    assert not worker.agent.has_work


def test_a_stop_token_of_a_step_in_flight_ends_a_sequence_that_is_handed_over() -> None:
    worker = running()
    first, second = worker.plan(), worker.plan()
    worker.agent.hand_over(ONE)
    done = worker.complete(first, EOS)
    assert (done.tokens, [end.reason for end in done.finished]) == ({0: (EOS,)}, [FinishReason.STOP])
    done = worker.complete(second, 4)
    assert (done.tokens, done.finished, done.forgotten) == ({}, (), (0,))


@pytest.mark.parametrize("phase", ["waits", "runs", "is preempted"])
def test_a_sequence_without_a_step_in_flight_is_handed_over_at_once(phase: str) -> None:
    worker = Driver()
    worker.submit(0, range(6), max_tokens=8)
    if phase != "waits":
        worker.admit(0, [0, 1])
    if phase == "is preempted":
        plan = worker.plan()
        worker.preempt(0)
        worker.agent.hand_over(ONE)
        assert worker.agent.departures().finished == ()
        done = worker.complete(plan, 3)
        assert (done.tokens, done.preempted) == ({0: (3,)}, ()), "its end wins over the preemption"
    else:
        worker.agent.hand_over(ONE)
        done = worker.agent.departures()
    assert [end.reason for end in done.finished] == [FinishReason.CANCELLED]
    assert not worker.agent.has_work
