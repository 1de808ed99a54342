"""Whether the memory of processes is flat: what counts, what is found, and when nothing can be said."""

from __future__ import annotations

import os
import random

import pytest

from bench.lib.memory_watch import FLAT, GROWS, MIB, OPEN, Bounds, MemoryWatch, Value, own_bytes

SETTLED_S = 600.0


def watched(leak_bytes: float = 0.0, values: int = 40, noise_mib: float = 0.1, filling: bool = False) -> MemoryWatch:
    """Return the watch of one process that leaks so much with each request; 300 requests lie between two values."""
    watch, rng = MemoryWatch(SETTLED_S, Bounds(10.0, 128.0)), random.Random(1)
    for number in range(-40 if filling else 0, values):
        seconds, requests = SETTLED_S + 15.0 * number, 300 * (number + 40)
        full = 100.0 + min(0, number) + leak_bytes * requests / MIB + rng.gauss(0.0, noise_mib)
        watch.add("router", 7, 0.0, Value(seconds, requests, full, 30, 12))
    return watch


def test_memory_that_stays_is_flat_and_bounded() -> None:
    found = watched().figures()
    assert (found["memory_flat"], found["memory_flat_router"], found["memory_values_router"]) == (FLAT, FLAT, 40)
    assert found["uss_mib_per_hour_low_router"] < 0.0 < found["uss_mib_per_hour_high_router"] < 5.0
    assert found["uss_bytes_per_request_high_router"] < 64.0


def test_a_table_that_keeps_one_entry_of_each_request_is_found() -> None:
    found = watched(leak_bytes=250.0).figures()
    assert (found["memory_flat"], found["memory_flat_router"]) == (GROWS, GROWS)
    assert found["uss_bytes_per_request_router"] == pytest.approx(250.0, rel=0.2)


def test_tables_that_fill_after_the_start_do_not_count() -> None:
    """They grow by 240 MiB an hour until the process is old enough."""
    found = watched(filling=True).figures()
    assert (found["memory_flat"], found["memory_values_router"]) == (FLAT, 40)


@pytest.mark.parametrize("watch", [watched(values=11), watched(noise_mib=30.0), MemoryWatch(SETTLED_S)])
def test_too_few_values_and_too_much_noise_say_nothing(watch: MemoryWatch) -> None:
    assert watch.figures()["memory_flat"] == OPEN


def test_one_process_that_grows_is_the_verdict_of_all() -> None:
    watch = watched(leak_bytes=250.0)
    watch.add("young", 8, 0.0, Value(1.0, 1, 1.0, 1, 1))
    for number in range(40):
        watch.add("redis", 9, 0.0, Value(SETTLED_S + number, number, 5.0, 10 + number, 4))
    found = watch.figures()
    assert [found[f"memory_flat{each}"] for each in ("", "_router", "_redis", "_young")] == [GROWS, GROWS, FLAT, OPEN]
    assert (found["fds_redis"], found["fds_more_redis"], found["threads_more_redis"]) == (49, 39, 0)


def test_two_lives_of_a_process_have_one_slope_and_each_begins_anew() -> None:
    watch = MemoryWatch(SETTLED_S)
    for pid, began, start in ((1, 0.0, 50.0), (2, 1_000.0, 90.0)):
        for number in range(20):
            watch.add("worker", pid, began, Value(began + SETTLED_S + 15.0 * number, 300 * number, start, 20, 8))
        watch.add("worker", pid, began, Value(began + 1.0, 0, 1.0, 1, 1))
    found = watch.figures()
    assert (found["memory_values_worker"], found["uss_mib_per_hour_worker"]) == (40, 0.0)
    assert found["memory_flat"] == FLAT


def test_it_looks_at_processes_and_passes_over_those_that_ended() -> None:
    watch = MemoryWatch(0.0)
    watch.look({"this": os.getpid(), "gone": 2**22 - 1}, 5.0, 3)
    found = watch.figures()
    assert found["uss_mib_this"] > 1.0
    assert (found["fds_this"] > 0, found["threads_this"] > 0, "uss_mib_gone" in found) == (True, True, False)


ROLLUP = """55d0-7ffe ---p 00000000 00:00 0    [rollup]
Rss:              118004 kB
Shared_Clean:      {shared} kB
Shared_Dirty:          0 kB
Private_Clean:     {clean} kB
Private_Dirty:     83164 kB
Swap:               4000 kB
SwapPss:            {swap} kB
Locked:                0 kB
"""


def test_a_library_that_a_neighbour_maps_too_or_no_more_changes_nothing() -> None:
    shared, alone = ROLLUP.format(shared=34704, clean=136, swap=0), ROLLUP.format(shared=28500, clean=6340, swap=0)
    assert own_bytes(shared) == own_bytes(alone) == 83164 * 1024


def test_memory_that_is_swapped_out_counts() -> None:
    assert own_bytes(ROLLUP.format(shared=0, clean=0, swap=3000)) == (83164 + 3000) * 1024
