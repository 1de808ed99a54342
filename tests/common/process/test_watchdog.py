"""Work that stands still turns health over, and back; a process that did not run explains its own silence."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from common.process.watchdog import LastResort, StallClock, Watchdog, Work, next_period
from tests.support.waiting import until

BOUND = 30.0


def _looks(clock: StallClock, work: Work, since: float, seconds: int) -> str:
    """Look once a second; return the last reason."""
    reason = ""
    for second in range(1, seconds + 1):
        reason = clock.look(work, since + second)
    return reason


def test_work_that_waits_for_longer_than_the_bound_is_named_and_not_before() -> None:
    clock, work = StallClock(BOUND), Work("3 wait", 7)
    assert clock.look(work, 0.0) == ""
    assert _looks(clock, work, 0.0, 30) == ""
    assert _looks(clock, work, 30.0, 1) == "3 wait, for more than 30 s (--stall-timeout)"


def test_anything_that_goes_on_starts_anew() -> None:
    clock = StallClock(BOUND)
    clock.look(Work("3 wait", 7), 0.0)
    assert _looks(clock, Work("3 wait", 7), 0.0, 29) == ""
    assert _looks(clock, Work("3 wait", 8), 29.0, 29) == ""
    assert _looks(clock, Work("", 8), 58.0, 1) == ""
    assert _looks(clock, Work("3 wait", 8), 59.0, 30) == ""
    assert _looks(clock, Work("3 wait", 8), 89.0, 1) != ""
    assert _looks(clock, Work("3 wait", 9), 90.0, 1) == ""


def test_time_in_which_the_process_itself_did_not_run_is_left_out() -> None:
    clock, work = StallClock(BOUND), Work("3 wait", 7)
    clock.look(work, 0.0)
    assert clock.look(work, 3600.0) == ""
    assert _looks(clock, work, 3600.0, 28) == ""


async def test_each_part_has_a_clock_of_its_own_and_health_hears_only_of_changes() -> None:
    works = {"w0": Work("1 waits", 1), "w1": Work("2 wait", 1)}
    told: list[str] = []

    async def report(reason: str) -> None:
        told.append(reason)

    watchdog = Watchdog(BOUND, lambda: works, report, CollectorRegistry())
    for second in range(33):
        works["w1"] = Work("2 wait", second)  # that one goes on
        await watchdog.check(float(second))
    assert told == ["w0: 1 waits, for more than 30 s (--stall-timeout)"]
    assert watchdog.reason == told[0]
    works["w0"] = Work("1 waits", 2)
    await watchdog.check(33.0)
    assert told[1:] == [""]
    del works["w0"], works["w1"]
    await watchdog.check(34.0)
    assert len(told) == 2


async def test_the_last_resort_acts_on_what_stands_still_now_and_did_at_an_earlier_look() -> None:
    works, told, acted = {"w0": Work("2 wait", 1)}, list[str](), list[str]()

    async def report(reason: str) -> None:
        told.append(reason)

    resort = LastResort(2 * BOUND, lambda name, _: acted.append(name))
    watchdog = Watchdog(BOUND, lambda: works, report, CollectorRegistry(), resort)
    for second in range(int(2 * BOUND) + 1):
        await watchdog.check(float(second))
    assert (len(told), acted) == (1, [])
    works["w0"] = Work("", 1)  # it goes on just before the look that would act
    await watchdog.check(2 * BOUND + 1)
    assert acted == []
    works["w0"] = Work("2 wait", 2)
    for second in range(int(4 * BOUND) + 3):
        await watchdog.check(100.0 + second)
    assert acted == ["w0", "w0"], "again after as long"


async def test_health_says_so_before_the_last_resort_acts() -> None:
    told, acted = list[str](), list[int]()

    async def report(reason: str) -> None:
        told.append(reason)

    resort = LastResort(0.0, lambda *_: acted.append(len(told)))
    watchdog = Watchdog(BOUND, lambda: {"w0": Work("2 wait", 1)}, report, CollectorRegistry(), resort)
    for second in range(int(BOUND) + 3):
        await watchdog.check(float(second))
    assert acted[0] == 1


async def test_a_blocked_loop_shows_as_lag() -> None:
    registry = CollectorRegistry()

    async def report(_: str) -> None:
        """Nothing waits."""

    async def has_lagged() -> bool:
        """Block the loop once more: a process that was idle looks once a second, and a block may end before that."""
        time.sleep(0.4)  # noqa: ASYNC251 - what a callback must not do
        return (registry.get_sample_value("quire:event_loop_lag_seconds_sum") or 0.0) >= 0.25

    task = asyncio.create_task(Watchdog(BOUND, dict, report, registry).run())
    try:
        await until(has_lagged, seconds=60.0)
    finally:
        task.cancel()


def test_an_idle_process_has_one_timer_a_second_and_a_busy_one_ten() -> None:
    assert next_period(cpu_seconds=0.0, seconds=1.0) == 1.0
    assert next_period(cpu_seconds=0.019, seconds=1.0) == 1.0
    assert next_period(cpu_seconds=0.02, seconds=1.0) == 0.1
    assert next_period(cpu_seconds=0.002, seconds=0.1) == 0.1
    assert next_period(cpu_seconds=0.0, seconds=0.1) == 1.0
