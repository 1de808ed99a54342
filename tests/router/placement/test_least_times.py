"""Lower bounds of first tokens: of whom, for how long, and how far they depend on the request."""

from __future__ import annotations

import math
from collections.abc import Iterable

from router.placement.routing import LOOK_EVERY_S, MOST_PRICED, Bounds, LeastTime, LeastTimes
from router.placement.worker_model import Capacity, Load, WorkerModel

LARGE = Capacity(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=1024)
SMALL = Capacity(num_blocks=8, block_size=8, max_num_seqs=8, max_model_len=64)


def worker(name: str, capacity: Capacity = LARGE) -> WorkerModel:
    return WorkerModel(name, capacity, Load(), 0.0)


def looked(times: Iterable[LeastTime], away: Iterable[WorkerModel] = (), workers: int = 9) -> LeastTimes:
    least = LeastTimes()
    least.keep(times, away, workers, 0.0)
    return least


def bounds(
    least: LeastTimes, workers: list[WorkerModel], tokens: int = 100, hits: dict[str, int] | None = None
) -> Bounds:
    return least.bounds(workers, hits or {}, tokens, {"avoided"}, lambda each: each.max_model_len >= tokens)


def test_a_bound_has_what_is_before_the_request_and_its_own_work() -> None:
    one, two = worker("one"), worker("two")
    least = looked([LeastTime(one, 5.0, 0.1, 0.5), LeastTime(two, 1.0, 0.2, 0.5)])
    found = bounds(least, [one, two], hits={"two": 3})
    assert found.full == [(15.5, "one"), (1.0 + 52 * 0.2 + 0.5, "two")]
    assert found.work == [(10.5, "one"), (52 * 0.2 + 0.5, "two")]
    assert bounds(least, [one], hits={"one": 99}).work == [(4 * 0.1 + 0.5, "one")], "the last token is computed"
    assert (found.least_s({"two"}, passes=False), found.least_s((), passes=True)) == (15.5, 10.5)
    assert found.least_s({"one", "two"}, passes=True) == math.inf


def test_workers_that_cannot_serve_a_request_bound_nothing_and_new_ones_may_be_the_soonest() -> None:
    workers = [worker("small", SMALL), worker("large"), worker("avoided"), worker("hangs"), worker("new")]
    least = looked([LeastTime(each, 1.0, 0.0, 0.0) for each in workers[:3]], away=[workers[3]])
    assert bounds(least, workers).full == [(1.0, "large"), (0.0, "new")]
    assert [name for _, name in bounds(least, workers, tokens=64).full] == ["small", "large", "new"]


def test_one_in_trouble_that_fits_and_does_not_drain_may_recover() -> None:
    hangs, drains, small, avoided = worker("hangs"), worker("drains"), worker("small", SMALL), worker("avoided")
    drains.draining = True
    least = looked([], away=[hangs, drains, small, avoided])
    assert bounds(least, [hangs, drains, small, avoided]).recovers
    assert not bounds(least, [drains, small, avoided]).recovers


def test_the_soonest_are_those_with_the_lowest_bounds_with_what_is_before_the_request_and_without() -> None:
    workers = [worker(f"w{number}") for number in range(1000)]
    times = [LeastTime(each, float(1000 - number), 0.0, float(number)) for number, each in enumerate(workers)]
    times[500] = LeastTime(workers[500], 0.0, 0.0, 600.0)
    found = bounds(looked(times), workers).soonest()
    half = MOST_PRICED // 2
    assert {f"w{number}" for number in range(half)} <= found, "their own work is least"
    assert "w500" in found
    assert len(found) <= MOST_PRICED


def test_a_look_counts_for_a_while_and_for_no_more_workers_than_it_saw() -> None:
    assert LeastTimes().is_old(0, 0.0)
    least = looked([], workers=100)
    assert not least.is_old(100, LOOK_EVERY_S / 2)
    assert least.is_old(100, LOOK_EVERY_S)
    assert least.is_old(101, 0.0), "a sequence that moves is placed among the workers with room in their batch"
