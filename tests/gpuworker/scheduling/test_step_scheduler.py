"""Exact plans on tiny pools: one token budget, decodes first, sharers that compute a prefix once."""

from __future__ import annotations

import pytest

from common.contracts.types import SequenceId
from gpuworker.scheduling.batch_plan import StepResult
from tests.support.gpuworker.agent_harness import Driver


def test_a_prompt_is_computed_in_one_step_and_its_last_row_samples() -> None:
    worker = Driver()
    worker.submit(0, range(6))
    worker.admit(0, [3, 5])
    assert worker.rows() == [(0, 0, 6, (3, 5), True)]


def test_the_next_step_is_planned_with_the_token_that_is_still_being_drawn() -> None:
    worker = Driver()
    worker.submit(0, range(6))
    worker.admit(0, [3, 5])
    worker.plan()
    assert worker.rows() == [(0, 6, 1, (3, 5), True)]
    assert worker.agent.plan() is None, "at most two steps are in flight"


def test_nothing_is_planned_when_nothing_runs() -> None:
    worker = Driver()
    assert worker.agent.plan() is None
    worker.submit(0, range(6))
    assert worker.agent.plan() is None


def test_behaviour_22_a_long_prefill_is_capped_only_beside_others() -> None:
    worker = Driver(num_blocks=200, block_size=16, max_num_batched_tokens=1024, long_prefill_cap=400)
    worker.submit(0, range(1500))
    worker.admit(0, list(range(94)))
    assert [(r.start, r.length, r.samples) for r in worker.plan().rows] == [(0, 1024, False)]

    both = Driver(num_blocks=200, block_size=16, max_num_batched_tokens=1024, long_prefill_cap=400)
    both.submit(0, range(1500))
    both.submit(1, range(5000, 6000))
    both.admit(0, list(range(94)))
    both.admit(1, list(range(94, 157)))
    assert [(r.sequence, r.start, r.length) for r in both.plan().rows] == [(0, 0, 400), (1, 0, 400)]


def test_behaviour_22_decodes_come_first_and_a_chunk_fills_the_rest() -> None:
    worker = Driver(num_blocks=16, max_num_batched_tokens=8)
    worker.submit(0, range(100, 120))
    worker.submit(1, range(3))
    worker.admit(1, [0])
    worker.step()
    worker.admit(0, [1, 2, 3, 4, 5])
    assert worker.rows() == [(1, 3, 1, (0,), True), (0, 0, 7, (1, 2, 3, 4, 5), False)]


def test_behaviour_27_a_sequence_without_budget_is_deferred_and_keeps_its_place() -> None:
    worker = Driver(num_blocks=16, max_num_batched_tokens=4)
    for sequence, row in ((0, [0, 1]), (1, [2, 3]), (2, [4, 5])):
        worker.submit(sequence, range(10 * sequence, 10 * sequence + 6))
        worker.admit(sequence, row)
    assert worker.rows() == [(0, 0, 4, (0, 1), False)]
    counts = worker.agent.counts()
    assert (counts.deferred, counts.stalled) == (2, 0)
    assert worker.rows() == [(0, 4, 2, (0, 1), True), (1, 0, 2, (2, 3), False)]


def test_higher_priority_is_senior_then_earlier_arrival() -> None:
    worker = Driver(num_blocks=16)
    for sequence, priority, row in ((0, 0, [0]), (1, 5, [1]), (2, 5, [2])):
        worker.submit(sequence, [sequence, 7], priority=priority)
        worker.admit(sequence, row)
    assert [row[0] for row in worker.rows()] == [1, 2, 0]


def test_a_row_binds_the_head_of_the_pool_when_it_needs_a_block() -> None:
    worker = Driver()
    worker.submit(0, range(4))
    worker.admit(0, [6])
    worker.lease([2, 7])
    worker.step()
    assert worker.rows() == [(0, 4, 1, (6, 2), True)]
    report = worker.agent.take_report()
    assert report is not None
    assert report.bind == ((0, 2),)


def test_a_row_without_a_block_stalls_and_goes_on_with_a_lease() -> None:
    worker = Driver()
    worker.submit(0, range(4))
    worker.admit(0, [6])
    worker.step()
    assert worker.agent.plan() is None
    report = worker.agent.take_report()
    assert report is not None
    assert report.stalled == (0,)
    worker.lease([1])
    assert worker.rows() == [(0, 4, 1, (6, 1), True)]


@pytest.mark.parametrize(("more", "bound"), [(4, 0), (19, 1)])
def test_behaviour_9_decode_growth_takes_a_block_only_at_the_boundary(more: int, bound: int) -> None:
    worker = Driver(num_blocks=8, block_size=16)
    worker.submit(0, range(55), max_tokens=more + 1)
    worker.admit(0, [0, 1, 2, 3])
    worker.lease([4, 5])
    taken = 0
    for _ in range(more + 1):
        worker.step()
        report = worker.agent.take_report()
        taken += len(report.bind) if report else 0
    assert taken == bound


def test_behaviour_9_a_block_is_sealed_by_the_step_that_fills_it() -> None:
    worker = Driver(num_blocks=8, block_size=16)
    worker.submit(0, range(55), max_tokens=30)
    worker.admit(0, [0, 1, 2, 3])
    worker.lease([4])
    sealed_at: dict[int, int] = {}
    for step in range(12):
        worker.step()
        report = worker.agent.take_report()
        sealed_at |= {block: step for block, _ in (report.seal if report else ())}
    # Step 0 computes 55 positions; step n computes position 54 + n, so the 64th slot is written by step 9.
    assert sealed_at == {0: 0, 1: 0, 2: 0, 3: 9}


def test_behaviour_11_no_position_beyond_the_limit_is_planned() -> None:
    worker = Driver()
    worker.submit(0, range(3), max_tokens=2)
    worker.admit(0, [0, 1])
    first, second = worker.plan(), worker.plan()
    assert [row.start for row in second.rows] == [3]
    worker.complete(first)
    assert worker.agent.plan() is None, "the fifth token is the last one, and it is being drawn"
    done = worker.complete(second)
    assert [(f.sequence, f.reason) for f in done.finished] == [(0, "length")]


class TestInFlightSharing:
    """A prefix that several sequences share is computed once, by whichever comes to it."""

    PREFIX = 768

    def sixteen(self) -> Driver:
        worker = Driver(num_blocks=80, block_size=16, max_num_batched_tokens=256)
        shared = list(range(48))
        for sequence in range(16):
            worker.submit(sequence, [*range(self.PREFIX), 2000 + sequence], max_tokens=2)
            worker.admit(sequence, [*shared, 48 + sequence], shared=48 if sequence else 0)
        return worker

    def test_behaviour_21b_a_shared_prefix_is_computed_once(self) -> None:
        worker, computed, tokens = self.sixteen(), 0, 0
        while tokens < 16:
            done = worker.step()
            computed += done.computed
            tokens += len(done.tokens)
        assert computed == self.PREFIX + 16

    @pytest.mark.parametrize("step", [0, 1, 2, 3])
    @pytest.mark.parametrize("in_flight", [False, True])
    def test_behaviour_21b_losing_whichever_computes_loses_nothing(self, step: int, in_flight: bool) -> None:
        worker, computed, finished = self.sixteen(), 0, 0
        for _ in range(step):
            computed += worker.step().computed
        plan = worker.plan() if in_flight else None
        first = plan.rows[0].sequence if plan else SequenceId(0)
        worker.agent.cancel_sequence(first)
        finished += len(worker.agent.departures().finished)
        if plan:
            computed += worker.complete(plan).computed
        while worker.agent.has_work:
            done = worker.step()
            computed += done.computed
            finished += len(done.finished)
        assert finished == 16
        assert computed <= self.PREFIX + 16 * 2, "nothing of the prefix is computed twice"


def test_a_sharer_reads_in_the_same_step_what_another_row_writes() -> None:
    worker = Driver()
    worker.submit(0, range(8))
    worker.submit(1, [*range(4), 70, 71])
    worker.admit(0, [0, 1])
    worker.admit(1, [0, 2], shared=1)
    assert worker.rows() == [(0, 0, 8, (0, 1), True), (1, 4, 2, (0, 2), True)]


def test_steps_complete_in_order() -> None:
    worker = Driver()
    worker.submit(0, range(6))
    worker.admit(0, [3, 5])
    worker.plan()
    second = worker.plan()
    with pytest.raises(ValueError, match="oldest in flight"):
        worker.agent.complete(StepResult(second.step, {}))


def test_a_prompt_of_higher_priority_comes_before_decodes_that_fill_the_budget() -> None:
    worker = Driver(num_blocks=32, max_num_batched_tokens=4)
    for sequence in range(3):
        worker.submit(sequence, [sequence, 7], max_tokens=20)
        worker.admit(sequence, [sequence])
        worker.step()
    worker.submit(3, range(100, 110), priority=100)
    worker.admit(3, [8, 9, 10])
    assert [row[:3] for row in worker.rows()] == [(3, 0, 4)]
    assert worker.agent.counts().deferred == 3
    assert [row[:3] for row in worker.rows()] == [(3, 4, 4)]


def test_a_decode_of_higher_priority_comes_before_a_prompt() -> None:
    worker = Driver(num_blocks=32, max_num_batched_tokens=4)
    for sequence, priority in ((0, 9), (1, 0)):
        worker.submit(sequence, [sequence, 7], max_tokens=20, priority=priority)
        worker.admit(sequence, [2 * sequence, 2 * sequence + 1])
        worker.step()
    worker.submit(2, range(100, 105), priority=5)
    worker.admit(2, [8, 9])
    assert [row[:3] for row in worker.rows()] == [(0, 3, 1), (2, 0, 3)]
    assert [row[:3] for row in worker.rows()] == [(0, 4, 1), (1, 2, 1), (2, 3, 2)]


def test_a_prompt_keeps_no_more_of_the_budget_than_its_scores_allow() -> None:
    worker = Driver(num_blocks=32, max_num_batched_tokens=8, max_scored_tokens=4)
    worker.submit(0, [0, 7], max_tokens=20)
    worker.admit(0, [0])
    worker.step()
    worker.submit(1, range(100, 140), priority=5, score_until=39)
    worker.admit(1, list(range(1, 11)))
    assert [row[:3] for row in worker.rows()] == [(0, 2, 1), (1, 0, 4)]


def test_a_prompt_without_blocks_keeps_nothing_of_the_budget() -> None:
    worker = Driver(num_blocks=32, max_num_batched_tokens=4, window=8)
    worker.submit(0, [0, 7], max_tokens=20)
    worker.admit(0, [0])
    worker.step()
    worker.submit(1, range(100, 120), priority=5)
    worker.admit(1, [1])
    assert [row[:3] for row in worker.rows()] == [(1, 0, 4)]
    assert [row[:3] for row in worker.rows()] == [(0, 2, 1)]


def test_a_windowed_prompt_stalls_only_when_no_step_of_it_may_let_blocks_go() -> None:
    worker = Driver(num_blocks=32, max_num_batched_tokens=8, window=4)
    worker.submit(0, range(20))
    worker.admit(0, [0])
    first = worker.plan()
    assert [row[:3] for row in first.rows] == [(0, 0, 4)]
    assert worker.agent.plan() is None
    before = worker.agent.take_report()
    assert before is None or before.stalled == ()
    worker.complete(first)
    assert worker.agent.plan() is None
    after = worker.agent.take_report()
    assert after is not None
    assert after.stalled == (0,)


def test_prompt_tokens_in_flight_are_pending_until_their_step_is_over() -> None:
    """A router adds them to the wait of the next request, which runs behind that step."""
    worker = Driver(num_blocks=8, max_num_batched_tokens=8)
    worker.submit(0, list(range(11)), max_tokens=4)
    assert worker.agent.counts().pending_prefill == 10, "the last token samples: it is part of any step"
    worker.admit(0, [0, 1, 2])
    first = worker.agent.plan()
    assert first is not None
    counts = worker.agent.counts()
    assert (first.prefilled, counts.pending_prefill, counts.prefill_in_flight) == (8, 10, 8)
    worker.complete(first)
    counts = worker.agent.counts()
    assert (counts.pending_prefill, counts.prefill_in_flight) == (2, 0)
