"""What a worker measures on its steps, and the prediction of a step before there are rates."""

from __future__ import annotations

import pytest

from common.contracts.types import BlockId, SequenceId
from gpuworker.engine.step_rates import StepRates, StepTimes, UsualSteps
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan


def plan(decodes: int, prefill: int = 0) -> StepPlan:
    """Return a step of `decodes` decode rows and, if any, a chunk of `prefill` positions that draws nothing."""
    rows = [ScheduledRow(SequenceId(i), 9, 1, (BlockId(i),), samples=True) for i in range(decodes)]
    if prefill:
        rows.append(ScheduledRow(SequenceId(99), 0, prefill, (BlockId(99),), samples=False))
    return StepPlan(1, tuple(rows))


def test_a_row_that_draws_counts_one_position_as_decode() -> None:
    whole_prompt = ScheduledRow(SequenceId(1), 0, 10, (BlockId(1),), samples=True)
    assert StepPlan(1, (whole_prompt,)).prefilled == 9
    assert plan(3, prefill=20).prefilled == 20


def test_a_step_is_not_predicted_before_its_rates_are_learnt() -> None:
    rates = StepRates()
    assert rates.predict(plan(2)) == 0.0
    rates.learn(plan(2), 0.01)
    assert rates.predict(plan(2)) == pytest.approx(0.01)
    assert rates.predict(plan(2, prefill=100)) == 0.0
    rates.learn(plan(2, prefill=100), 0.21)
    assert rates.predict(plan(2, prefill=50)) == pytest.approx(0.01 + 50 * 0.002)


def test_a_rate_moves_by_a_tenth_towards_each_step() -> None:
    rates = StepRates()
    rates.learn(plan(1), 0.010)
    rates.learn(plan(1), 0.020)
    assert rates.decode_step == pytest.approx(0.011)


def test_every_step_is_counted_by_what_was_in_it_and_how_long_it_took() -> None:
    rates = StepRates()
    for seconds in (0.0005, 0.001, 0.004):
        rates.learn(plan(1), seconds)
    rates.learn(plan(1, prefill=3), 7.0)
    assert rates.decode_times.counts == (2, 0, 1, *[0] * 10)
    assert rates.decode_times.seconds == pytest.approx(0.0055)
    assert rates.mixed_times == StepTimes((*[0] * 12, 1), 7.0)


def test_a_short_prefill_teaches_nothing() -> None:
    rates = StepRates()
    rates.learn(plan(1, prefill=15), 5.0)
    assert (rates.decode_step, rates.prefill_token) == (0.0, 0.0)


def test_a_prefill_quicker_than_the_learnt_decode_shows_that_decodes_were_disturbed() -> None:
    rates = StepRates()
    rates.learn(plan(1), 0.500)
    rates.learn(plan(1, prefill=100), 0.100)
    assert rates.decode_step == pytest.approx(0.460)
    assert rates.prefill_token == 0.0
    for _ in range(30):
        rates.learn(plan(1, prefill=100), 0.100)
    assert rates.decode_step == pytest.approx(0.100, rel=0.2)


def test_a_step_has_lost_what_it_takes_beyond_many_times_its_usual() -> None:
    usual = UsualSteps()
    assert usual.lost(plan(1), 9.0) == 0.0, "of the first one nothing is known"
    usual = UsualSteps()
    for _ in range(3):
        assert usual.lost(plan(1), 0.01) == 0.0
    assert usual.lost(plan(1), 0.079) == 0.0
    usual = UsualSteps()
    usual.lost(plan(1), 0.01)
    assert usual.lost(plan(1), 1.51) == pytest.approx(1.5)
    assert usual.lost(plan(1), 0.01) == 0.0
    assert usual.lost(plan(1), 1.51) == pytest.approx(1.5), "nothing was learnt from what was lost"


def test_a_short_step_that_takes_a_few_milliseconds_more_has_lost_nothing() -> None:
    usual = UsualSteps()
    usual.lost(plan(1), 0.001)
    assert usual.lost(plan(1), 0.015) == 0.0


def test_what_lasts_becomes_the_usual() -> None:
    usual = UsualSteps()
    usual.lost(plan(1), 0.01)
    lost = [usual.lost(plan(1), 0.12) for _ in range(60)]
    assert lost[0] == pytest.approx(0.11)
    assert lost[-1] == 0.0
    assert 30 <= sum(map(bool, lost)) <= 45
