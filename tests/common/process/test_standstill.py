"""What a process knows of the times when it stood still."""

from __future__ import annotations

import time

import pytest

from common.process.standstill import Standstill
from tests.support.waiting import until


def test_spans_of_time_count_once_and_only_within_what_is_asked_for() -> None:
    still = Standstill()
    still.add(10.0, 12.0)
    still.add(11.0, 12.5)  # noticed twice
    still.add(11.5, 12.0)
    still.add(20.0, 21.0)
    assert still.seconds(30.0) == 3.5
    assert still.between(0.0, 30.0) == 3.5
    assert still.between(11.0, 20.5) == 2.0
    assert still.between(12.5, 20.0) == 0.0


def test_what_came_right_after_a_standstill_may_have_waited_for_its_end() -> None:
    still = Standstill()
    still.add(10.0, 12.0)
    assert still.just_before(12.0) == 2.0
    assert still.just_before(12.05) == 2.0
    assert still.just_before(11.0) == 1.0
    assert still.just_before(12.2) == 0.0


def test_a_timer_that_fires_late_tells_of_a_standstill_between_two_moments() -> None:
    """Within the pause of the timer nobody knows when it began: that counts where it is a bound alone."""
    still = Standstill()
    still.ticked(began=10.0, pause=1.0, now=11.05)
    assert still.seconds(20.0) == 0.0
    still.ticked(began=20.0, pause=1.0, now=22.5)
    assert (still.seconds(30.0), still.between(20.5, 22.0)) == (1.5, 1.0)
    assert still.just_before(22.5) == 2.5
    still.ticked(began=22.0, pause=0.05, now=22.51)
    assert still.just_before(22.6) == pytest.approx(0.01), "it ran at 22.5"


def test_only_the_latest_spans_are_kept_and_the_sum_has_all() -> None:
    still = Standstill()
    for number in range(100):
        still.add(2.0 * number, 2.0 * number + 1.0)
    assert still.seconds(999.0) == 100.0
    assert still.between(0.0, 999.0) == 64.0


async def test_a_loop_that_does_not_run_is_noticed_at_once_and_counted_once() -> None:
    """Who asks before the timer has fired gets the same answer as afterwards. Without work nobody looks."""
    busy = True
    still = Standstill(lambda: busy)
    still.begin()
    still.begin()
    began = time.monotonic()
    while time.monotonic() < began + 0.4:
        pass
    now = time.monotonic()
    at_once = still.seconds(now)
    assert 0.3 <= at_once <= now - began
    assert still.between(began, now) == pytest.approx(at_once)
    await until(lambda: not still.present(time.monotonic()))
    assert 0.3 <= still.between(began, now) <= now - began
    busy = False
    await until(lambda: not still.present(time.monotonic() + 60.0))
