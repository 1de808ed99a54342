"""How many cores there are to use, and how workers share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.process import cores
from common.process.cores import threads_of_each, usable_cores


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of eight cores; return where its quota is to be written."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "_CGROUP_V1", tmp_path)
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("quota", "usable"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_the_quota_of_a_container_counts(host: Path, quota: str, usable: int) -> None:
    host.write_text(quota + "\n")
    assert usable_cores() == usable


@pytest.mark.parametrize(("quota", "usable"), [("-1", 8), ("150000", 2), ("50000", 1), ("1600000", 8)])
def test_the_quota_of_the_first_version_of_control_groups_counts(host: Path, quota: str, usable: int) -> None:
    (host.parent / "cpu.cfs_quota_us").write_text(quota + "\n")
    (host.parent / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores() == usable


def test_without_a_quota_affinity_counts(host: Path) -> None:
    assert usable_cores() == 8


@pytest.mark.parametrize(
    ("available", "workers", "threads"), [(8, 1, 7), (8, 2, 3), (4, 3, 1), (4, 9, 1), (1, 1, 1), (2, 1, 1)]
)
def test_workers_share_all_cores_but_one(available: int, workers: int, threads: int) -> None:
    assert threads_of_each(workers, available) == threads
