"""How many cores there are to use, and how workers share them."""

from __future__ import annotations

import pytest

from common.process.cores import compute_cores, threads_of_each, usable_cores
from tests.support.machines import machine

QUOTA = "sys/fs/cgroup/cpu.max"


@pytest.mark.parametrize(
    ("quota", "usable", "computing"),
    [("max 100000", 16, 8), ("150000 100000", 2, 1), ("50000 100000", 1, 1), ("1600000 100000", 16, 8)],
)
def test_the_quota_of_a_container_counts(quota: str, usable: int, computing: int) -> None:
    found = machine("desktop", {QUOTA: quota})
    assert (usable_cores(found), compute_cores(found)) == (usable, computing)


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        ("one_core", 1),
        ("two_cores", 2),
        ("two_hyperthreads", 1),
        ("four_cores", 3),
        ("desktop", 7),
        ("sixty_four_cores", 63),
        ("xeon_two_sockets", 31),
    ],
)
def test_the_default_of_one_worker(name: str, threads: int) -> None:
    assert threads_of_each(1, machine(name)) == threads


@pytest.mark.parametrize(("name", "workers", "threads"), [("desktop", 2, 3), ("four_cores", 3, 1), ("two_cores", 2, 1)])
def test_workers_share_the_cores(name: str, workers: int, threads: int) -> None:
    assert threads_of_each(workers, machine(name)) == threads


@pytest.mark.parametrize(("quota", "threads"), [("200000", 2), ("290000", 2), ("400000", 3), ("90000", 1)])
def test_threads_stay_within_a_quota(quota: str, threads: int) -> None:
    assert threads_of_each(1, machine("sixty_four_cores", {QUOTA: f"{quota} 100000"})) == threads
