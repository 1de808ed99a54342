"""What a step leaves behind for a span: its parts follow one another, and fill the time from planning to result."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from common.contracts.clock import ManualClock
from common.contracts.types import BlockId, SequenceId
from gpuworker.engine.engine import Flight
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult

BLOCKS = (BlockId(0),)
ROWS = (
    ScheduledRow(SequenceId(1), 30, 1, BLOCKS, True, drafts=(7, 8)),
    ScheduledRow(SequenceId(2), 40, 1, BLOCKS, True),
    ScheduledRow(SequenceId(3), 0, 12, BLOCKS, True),
    ScheduledRow(SequenceId(4), 0, 1, BLOCKS, False),
)


def test_a_record_has_the_counts_and_the_seconds_of_each_part() -> None:
    clock = ManualClock(1.0)
    flight = Flight(StepPlan(5, ROWS, drafts=2, guessing=0.25), Future(), 0.5, clock.monotonic(), clock.time_ns())
    clock.advance(0.5)  # planning, in which the draft model guesses for a quarter
    flight.begin(clock)
    clock.advance(2.0)  # until the step before it is over
    flight.begin(clock)
    clock.advance(3.0)
    found = flight.record(StepResult(5, {}, seconds=2.5), clock.monotonic(), (SequenceId(1),))
    assert (found.step, found.decodes, found.prefill_tokens, found.drafts) == (5, 2, 13, 2)
    assert (found.begin_ns, found.end_ns, found.predicted) == (1_000_000_000, 6_500_000_000, 0.5)
    parts = (found.planning, found.guessing, found.waiting, found.running, found.finishing)
    assert parts == pytest.approx((0.25, 0.25, 2.0, 2.5, 0.5))
    assert sum(parts) == pytest.approx((found.end_ns - found.begin_ns) / 1e9)
    assert found.traced == (SequenceId(1),)


def test_copies_are_a_part_of_their_own() -> None:
    clock = ManualClock(1.0)
    flight = Flight(StepPlan(5, ROWS), Future(), 0.5, clock.monotonic(), clock.time_ns())
    flight.begin(clock)
    clock.advance(3.0)
    found = flight.record(StepResult(5, {}, seconds=2.0, copy_seconds=0.75), clock.monotonic(), ())
    assert (found.copying, found.running, found.finishing) == (0.75, 2.0, 0.25)


class JumpingClock(ManualClock):
    """A clock whose wall time is set, as NTP does it."""

    jumped_ns = 0

    def time_ns(self) -> int:
        return super().time_ns() + self.jumped_ns


@pytest.mark.parametrize("jump", [-60, 60])
@pytest.mark.parametrize("at", ["planning", "waiting", "running"])
def test_a_jump_of_the_wall_clock_changes_no_duration(at: str, jump: int) -> None:
    clock = JumpingClock(100.0)

    def passed(part: str, seconds: float) -> None:
        clock.advance(seconds)
        clock.jumped_ns += jump * 10**9 if part == at else 0

    plan = StepPlan(5, ROWS, drafts=2, guessing=0.25)
    flight = Flight(plan, Future(), 0.5, clock.monotonic(), clock.time_ns())
    passed("planning", 0.5)
    flight.begin(clock)
    passed("waiting", 2.0)
    flight.begin(clock)
    passed("running", 3.0)
    found = flight.record(StepResult(5, {}, seconds=2.5), clock.monotonic(), ())
    parts = (found.planning, found.guessing, found.waiting, found.running, found.finishing)
    assert parts == pytest.approx((0.25, 0.25, 2.0, 2.5, 0.5))
    assert found.begin_ns == 100 * 10**9
    assert found.end_ns - found.begin_ns == pytest.approx(5.5e9)


def test_no_part_is_negative_where_clocks_differ() -> None:
    clock = ManualClock(1.0)
    flight = Flight(StepPlan(5, ROWS[:1], drafts=2, guessing=0.25), Future(), 0.5, clock.monotonic(), clock.time_ns())
    flight.begin(clock)
    found = flight.record(StepResult(5, {}, seconds=0.1), clock.monotonic(), ())
    assert (found.planning, found.waiting, found.finishing) == (0.0, 0.0, 0.0)
