"""Which positions of prompts score the next token: bounded in a step, once and complete whatever happens."""

from __future__ import annotations

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.types import FinishReason, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan
from tests.support.gpuworker.agent_harness import Driver

ONE, TWO = SequenceId(1), SequenceId(2)


def scoring(worker: Driver, tokens: int, row: list[int], before: int = 0, max_tokens: int = 4) -> None:
    worker.submit(ONE, range(tokens), max_tokens, score_from=before, score_until=tokens - 1)
    worker.admit(ONE, row)


def parts(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(part.row, part.start, part.end) for part in plan.scored]


def test_all_positions_but_the_last_score_the_token_after_them() -> None:
    worker = Driver()
    scoring(worker, 6, [0, 1])
    plan = worker.plan()
    assert parts(plan) == [(0, 0, 5)]
    completion = worker.complete(plan)
    assert (completion.scored, completion.tokens) == ((ONE,), {ONE: (50,)})
    assert parts(worker.plan()) == []


def test_a_step_scores_a_bounded_number_of_positions() -> None:
    worker = Driver(max_scored_tokens=4)
    scoring(worker, 10, [0, 1, 2])
    plans = []
    for _ in range(3):
        plans.append(worker.plan())
        worker.complete(plans[-1])
    assert [(row.start, row.length, row.samples) for plan in plans for row in plan.rows] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
    ]
    assert [parts(plan) for plan in plans] == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9)]]


def test_the_bound_is_that_of_the_step_and_leaves_other_prompts_and_decodes_alone() -> None:
    worker = Driver(num_blocks=16, max_scored_tokens=4)
    worker.submit(0, range(3))
    worker.admit(0, [9])
    worker.step()
    scoring(worker, 8, [0, 1, 2])
    worker.submit(TWO, range(7), score_until=6)
    worker.admit(TWO, [3, 4])
    worker.submit(3, range(8))
    worker.admit(3, [5, 6])
    plan = worker.plan()
    assert [(row.sequence, row.start, row.length, row.samples) for row in plan.rows] == [
        (0, 3, 1, True),
        (ONE, 0, 4, False),
        (3, 0, 8, True),
    ]
    assert parts(plan) == [(1, 0, 4)]


def test_positions_whose_scores_the_router_has_are_computed_and_not_scored() -> None:
    worker = Driver(max_scored_tokens=2)
    scoring(worker, 8, [0, 1], before=5)
    plan = worker.plan()
    assert [(row.start, row.length) for row in plan.rows] == [(0, 8)]
    assert parts(plan) == [(0, 5, 7)]


def test_a_preempted_prompt_is_computed_again_and_gives_what_was_missing() -> None:
    worker = Driver(max_scored_tokens=3)
    scoring(worker, 8, [0, 1])
    first, second = worker.plan(), worker.plan()
    worker.preempt(ONE)
    assert worker.complete(first).scored == (ONE,)
    assert worker.complete(second).scored == (ONE,)
    report = worker.agent.take_report()
    assert report is not None
    assert report.preempted == ((ONE, 8),)
    (waiting,) = worker.agent.inventory().sequences
    assert waiting.reserve.computes_all
    worker.agent.attached(0)
    worker.admit(ONE, [4, 5])
    plan = worker.plan()
    assert [(row.start, row.length, row.samples) for row in plan.rows] == [(0, 8, True)]
    assert parts(plan) == [(0, 6, 7)]


def test_once_all_are_scored_a_preempted_sequence_may_take_hits() -> None:
    worker = Driver()
    scoring(worker, 8, [0, 1, 2])
    assert worker.agent.inventory().sequences[0].reserve.computes_all
    worker.agent.attached(0)
    worker.step()
    worker.preempt(ONE)
    (waiting,) = worker.agent.inventory().sequences
    assert not waiting.reserve.computes_all
    worker.agent.attached(0)
    worker.admit(ONE, [0, 1, 4], shared=2)
    assert parts(worker.plan()) == []


def test_a_new_incarnation_scores_again_what_was_in_flight() -> None:
    worker = Driver(max_scored_tokens=3)
    scoring(worker, 8, [0, 1])
    worker.complete(worker.plan())
    worker.plan()  # this one fails
    after = Driver(max_scored_tokens=3)
    after.agent.take_over(worker.agent.unfinished())
    after.admit(ONE, [6, 7])
    assert parts(after.plan()) == [(0, 3, 6)]


def test_a_cancelled_sequence_gets_no_scores_any_more() -> None:
    worker = Driver()
    scoring(worker, 6, [0, 1])
    plan = worker.plan()
    worker.agent.cancel_sequence(ONE, FinishReason.CANCELLED)
    assert worker.complete(plan).scored == ()


def test_shared_blocks_are_refused_while_scores_are_missing() -> None:
    worker = Driver()
    worker.submit(ONE, range(8), score_until=7)
    with pytest.raises(ProtocolViolation, match="shares 1 blocks, and computes all its tokens"):
        worker.admit(ONE, [0, 1], shared=1)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    worker = Driver()
    scoring(worker, 1, [0])
    assert worker.plan().scored == ()
