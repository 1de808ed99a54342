"""Steps with drafts on tiny pools: which rows draft, what is accepted, sealed and computed again; exact block ids."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.lease import GrantBatch
from common.contracts.types import BlockId, FinishReason, SequenceId
from gpuworker.engine.step_rates import StepRates
from gpuworker.scheduling.batch_plan import ScheduledRow, ScoredPart, StepPlan, StepResult, laid_out
from gpuworker.scheduling.drafting import MAX_DRAFTS, NO_PRICES, DraftPrices, Speculation, drafts_worth_it
from tests.support.gpuworker.agent_harness import EOS, Driver, blocks
from tests.support.gpuworker.drafted_rows import FIRST, begun, drafting, sampled


def test_a_row_computes_its_last_token_and_its_drafts() -> None:
    worker, _ = drafting(7, 8)
    begun(worker, 0, 5, [3, 4])
    (row,) = worker.plan().rows
    assert row == ScheduledRow(SequenceId(0), 5, 1, blocks([3, 4]), True, (7, 8))


def test_a_step_with_drafts_is_in_flight_alone() -> None:
    worker, _ = drafting(7, 8)
    begun(worker, 0, 5, [3, 4])
    worker.plan()
    assert worker.agent.plan() is None


def test_a_sequence_waits_for_its_token_where_drafting_pays() -> None:
    worker, _ = drafting(7)
    worker.submit(0, range(5), 20, speculation=Speculation())
    worker.admit(0, [3, 4])
    first = worker.plan()
    assert worker.agent.plan() is not None, "nothing is known of its output yet: two steps are in flight"
    worker.complete(first, FIRST)
    assert worker.agent.plan() is None, "the step in flight gives the token that the drafts follow"


def test_two_steps_stay_in_flight_where_drafting_does_not_pay() -> None:
    worker, _ = drafting(7, draft_prices=DraftPrices(step=1.0, draft=5.0))
    begun(worker, 0, 5, [3, 4])
    plans = [worker.plan(), worker.plan()]
    assert [plan.drafts for plan in plans] == [0, 0]


def test_right_drafts_are_computed_and_the_next_row_goes_on_behind_them() -> None:
    worker, made = drafting(7, 8, 9)
    worker.lease([6], target=4)
    begun(worker, 0, 5, [3, 4])
    completion = sampled(worker, worker.plan(), 7, 8, 1)
    assert completion.tokens == {0: (7, 8, 1)}
    assert (completion.drafted, completion.accepted, completion.computed) == (3, 2, 4)
    assert made[0].seen == [7, 8, 1]
    (row,) = worker.plan().rows
    assert (row.start, row.length, row.blocks[:2]) == (8, 1, blocks([3, 4]))


def test_a_refused_draft_leaves_its_slot_to_the_next_row() -> None:
    worker, _ = drafting(7, 8)
    begun(worker, 0, 5, [3, 4])
    sampled(worker, worker.plan(), 1)
    assert worker.agent._blocks.fill[4] == 2
    (row,) = worker.plan().rows
    assert (row.start, row.blocks) == (6, blocks([3, 4]))


def test_a_block_is_sealed_over_accepted_tokens_alone() -> None:
    worker, _ = drafting(7, 8, 9)
    begun(worker, 0, 5, [3, 4])
    worker.agent.take_report()
    sampled(worker, worker.plan(), 7, 1)  # position 7 has the K/V of 8, and token 7 is 1
    assert _seals(worker) == []
    sampled(worker, worker.plan(), 2)
    assert [block for block, _ in _seals(worker)] == [4]


def test_the_block_that_right_drafts_fill_is_sealed() -> None:
    worker, _ = drafting(7, 8, 9)
    begun(worker, 0, 5, [3, 4])
    worker.agent.take_report()
    sampled(worker, worker.plan(), 7, 8, 1)
    ((block, key),) = _seals(worker)
    assert block == 4
    assert key == worker.agent._sequences[SequenceId(0)].block_hashes[1]


def _seals(worker: Driver) -> list[tuple[BlockId, bytes]]:
    report = worker.agent.take_report()
    return list(report.seal) if report is not None else []


def test_drafts_bind_blocks_ahead_and_later_rows_use_them() -> None:
    worker, _ = drafting(7, 8, 9)
    worker.lease([6, 7], target=4)
    begun(worker, 0, 7, [3, 4])
    plan = worker.plan()
    assert (plan.rows[0].start, plan.rows[0].blocks) == (7, blocks([3, 4, 6]))
    sampled(worker, plan, 1)
    assert worker.plan().rows[0].blocks == blocks([3, 4, 6]), "the block of refused drafts is reused"


def test_drafts_end_where_the_pool_does_and_stall_nothing() -> None:
    worker, _ = drafting(7, 8, 9)
    begun(worker, 0, 6, [3, 4])
    plan = worker.plan()
    assert (plan.rows[0].start, plan.rows[0].drafts) == (6, (7,)), "position 7 is the last of two blocks"
    assert worker.agent.counts().stalled == 0


def test_drafts_leave_the_pool_to_prompts_of_the_same_step() -> None:
    worker, _ = drafting(7, 8, 9)
    worker.lease([6], target=4)
    begun(worker, 0, 7, [3, 4])
    worker.submit(1, range(500, 506))
    worker.admit(1, [0, 1])
    assert worker.plan().rows[0].drafts == ()


def test_drafts_end_one_token_before_the_limit() -> None:
    worker, _ = drafting(7, 8, 9, 10)
    begun(worker, 0, 3, [3, 4], max_tokens=4)
    assert worker.plan().rows[0].drafts == (7, 8), "one is sampled, and these make four"


def test_a_stop_token_among_the_accepted_ends_the_sequence_there() -> None:
    worker, _ = drafting(7, EOS, 9)
    worker.lease([6], target=4)
    begun(worker, 0, 5, [3, 4])
    completion = sampled(worker, worker.plan(), 7, EOS, 9, 1)
    assert completion.tokens == {0: (7, EOS)}
    (end,) = completion.finished
    assert (end.reason, end.usage.output_tokens) == (FinishReason.STOP, 3)
    assert (end.usage.drafted_tokens, end.usage.accepted_draft_tokens) == (3, 2)
    assert not worker.agent.has_work


def test_a_cancelled_sequence_counts_no_draft() -> None:
    worker, _ = drafting(7, 8, 9)
    begun(worker, 0, 5, [3, 4])
    plan = worker.plan()
    worker.agent.cancel_sequence(SequenceId(0))
    completion = sampled(worker, plan, 7, 8, 9, 1)
    assert (completion.tokens, completion.accepted) == ({}, 0)
    assert not worker.agent.has_work


def test_a_preempted_sequence_keeps_accepted_drafts_and_computes_them_again() -> None:
    worker, made = drafting(7, 8, 9)
    begun(worker, 0, 5, [3, 4])
    plan = worker.plan()
    worker.preempt(0)
    assert sampled(worker, plan, 7, 8, 1).tokens == {0: (7, 8, 1)}
    worker.admit(0, [1, 2, 5])
    (row,) = worker.plan().rows
    assert (row.start, row.length, row.drafts) == (0, 9, ()), "a prefill, which does not draft"
    assert made[0].seen == [7, 8, 1]


def test_blocks_behind_refused_drafts_are_released_at_the_end() -> None:
    worker, _ = drafting(7, 8, 9)
    worker.lease([6, 7], target=4)
    begun(worker, 0, 7, [3, 4])
    sampled(worker, worker.plan(), EOS)
    assert worker.agent.counts().unheld == 8 - len(worker.agent._blocks.pool)


def test_the_runway_covers_drafts() -> None:
    wants = []
    for speculation in (None, Speculation()):
        worker, _ = drafting(7, num_blocks=64, runway_slots=4)
        worker.submit(0, range(8), 100, speculation=speculation)
        worker.admit(0, [0, 1])
        worker.step(FIRST)
        wants.append(worker.agent._scheduler.lease_want(4))
    assert wants == [1, 1 + MAX_DRAFTS // 4]


def test_a_window_is_counted_from_the_accepted_tokens() -> None:
    worker, _ = drafting(7, 8, 9, window=4, num_blocks=8)
    worker.lease([6, 7], target=4)
    begun(worker, 0, 6, [3, 4])
    sampled(worker, worker.plan(), 1)
    assert worker.plan().rows[0].blocks[0] == 3, "position 7 reads from position 4 on; position 6 read from 3 on"


def test_sequences_that_may_not_draft_run_beside() -> None:
    worker, _ = drafting(7, 8)
    for sequence, speculation in ((0, Speculation()), (1, None)):
        worker.submit(sequence, range(10 * sequence, 10 * sequence + 5), 20, speculation=speculation)
        worker.admit(sequence, [2 * sequence, 2 * sequence + 1])
    worker.step(FIRST)
    assert [row.drafts for row in worker.plan().rows] == [(7, 8), ()]


def test_the_budget_of_a_step_bounds_drafts() -> None:
    worker, _ = drafting(7, 8, 9, max_num_batched_tokens=3)
    begun(worker, 0, 3, [3, 4])
    assert worker.plan().scheduled_tokens == 3


def test_a_reset_and_a_break_while_drafts_are_in_flight_lose_nothing() -> None:
    worker, _ = drafting(7, 8, 9)
    worker.lease([6, 7], target=4)
    begun(worker, 0, 7, [3, 4])
    plan = worker.plan()
    inventory = worker.agent.inventory()
    assert inventory.sequences[0].block_table == blocks([3, 4, 6])
    worker.agent.attached(4)
    worker.agent.apply_grant(GrantBatch(4, reset=1))
    assert sampled(worker, plan, 7, 1).tokens == {0: (7, 1)}


# ---------------------------------------------------------------- what a constraint forces


def forced(worker: Driver, plan: StepPlan, *tokens: int, then: tuple[int, ...] = ()) -> None:
    """Complete a step of sequence 0, with the tokens that its constraint forces then."""
    sequence = plan.rows[0].sequence
    worker.agent.complete(StepResult(plan.step, {sequence: tokens}, forced={sequence: then} if then else {}))
    worker.agent.check_invariants()


def constrained(*guesses: int, **config: Any) -> tuple[Driver, StepPlan]:
    """Return a worker with one sequence, and the plan that computes its prompt of five tokens."""
    worker, _ = drafting(*guesses, **config)
    worker.lease([6], target=4)
    worker.submit(0, range(5), 20, speculation=Speculation())
    worker.admit(0, [3, 4])
    return worker, worker.plan()


def test_forced_tokens_are_drafts_and_guesses_wait() -> None:
    worker, prefill = constrained(7, 8)
    forced(worker, prefill, FIRST, then=(60, 61, 62))
    plan = worker.plan()
    assert plan.rows[0].drafts == (60, 61, 62)
    forced(worker, plan, 60, 61, 62, 63)
    assert worker.plan().rows[0].drafts[:2] == (7, 8)


def test_forced_tokens_go_on_behind_those_that_were_sampled() -> None:
    worker, prefill = constrained(7)
    ahead = worker.plan()
    forced(worker, prefill, FIRST, then=(60, 61, 62))
    assert worker.agent.plan() is None, "the step in flight samples the first of them"
    forced(worker, ahead, 60)
    assert worker.plan().rows[0].drafts == (61, 62)


@pytest.mark.parametrize(("then", "waits"), [((60, 61), False), ((60, 61, 62), True)])
def test_two_steps_stay_in_flight_where_forced_tokens_do_not_earn_the_gap(then: tuple[int, ...], waits: bool) -> None:
    worker, prefill = constrained(draft_prices=DraftPrices(step=1.0, draft=0.1, gap=1.5))
    worker.plan()
    forced(worker, prefill, FIRST, then=then)
    assert (worker.agent.plan() is None) == waits


def test_tokens_that_were_not_sampled_are_forced_no_more() -> None:
    worker, prefill = constrained(7, 8)
    forced(worker, prefill, FIRST, then=(60, 61, 62))
    forced(worker, worker.plan(), 60, 9)
    assert worker.plan().rows[0].drafts == (7, 8)


# ---------------------------------------------------------------- layout, rates


def test_each_draft_has_a_row_of_its_own() -> None:
    row = ScheduledRow(SequenceId(4), 9, 1, blocks([1, 2]), True, (7, 8))
    prompt = ScheduledRow(SequenceId(5), 0, 3, blocks([3]), False)
    plan = laid_out(StepPlan(1, (row, prompt), scored=(ScoredPart(1, 0, 2),), drafts=2))
    plain = row._replace(drafts=())
    assert plan.rows == (plain, plain._replace(start=10), plain._replace(start=11), prompt)
    assert (plan.scored, plan.drafts) == ((ScoredPart(3, 0, 2),), 0)


def test_a_plan_without_drafts_is_laid_out_as_it_is() -> None:
    plan = StepPlan(1, (ScheduledRow(SequenceId(4), 9, 1, blocks([1]), True),))
    assert laid_out(plan) is plan


def test_prices_are_those_of_measured_steps() -> None:
    rates, row = StepRates(), ScheduledRow(SequenceId(0), 9, 1, blocks([1, 2]), True)
    assert rates.prices is NO_PRICES
    rates.learn(StepPlan(1, (row._replace(length=33, start=0),)), 0.032)
    rates.learn(StepPlan(2, (row,)), 0.010)
    assert rates.prices == DraftPrices(0.010, 0.001, 0.0), "a position of a prompt stands in for a draft"
    rates.learn(StepPlan(3, (row._replace(drafts=(1, 2, 3, 4)),), drafts=4), 0.012)
    rates.learn_gap(0.0003)
    assert rates.prices.step == 0.010
    assert rates.prices.draft == pytest.approx(0.0005)
    assert rates.prices.gap == pytest.approx(0.0003)
    assert rates.predict(StepPlan(4, (row._replace(drafts=(1, 2)),), drafts=2)) == pytest.approx(0.011)


def test_a_gap_counts_beyond_the_pace_of_steps_that_are_planned_ahead() -> None:
    """Steps of 1 ms that come every 3 ms lose nothing where each waits 1.5 ms for the one before it."""
    rates, plan = StepRates(), StepPlan(1, (ScheduledRow(SequenceId(0), 9, 1, blocks([1, 2]), True),))
    rates.learn(plan, 0.001)
    rates.learn_gap(0.0015)
    assert rates.prices == DraftPrices(0.001, 0.0, 0.0015)
    rates.learn_pace(plan, 0.003)
    assert rates.prices == DraftPrices(0.003, 0.0, 0.0)


def test_costs_of_drafts_are_forgotten_where_none_are_made() -> None:
    """A measurement that a busy machine spoilt would switch drafts off for ever."""
    rates, row = StepRates(), ScheduledRow(SequenceId(0), 9, 1, blocks([1, 2]), True)
    rates.learn(StepPlan(1, (row,)), 0.010)
    rates.learn(StepPlan(2, (row._replace(drafts=(1,)),), drafts=1), 1.010)
    rates.learn_gap(1.0)
    assert drafts_worth_it([1.0], 1, rates.prices) == [0]
    steps = 0
    while not any(drafts_worth_it([1.0], 1, rates.prices)):
        rates.learn(StepPlan(3, (row,)), 0.010)
        steps += 1
    assert 200 < steps < 600
