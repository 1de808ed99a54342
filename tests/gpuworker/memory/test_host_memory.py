"""The memory of a machine and of a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gpuworker.memory import host_memory

GIB = 1 << 30


@pytest.mark.parametrize("limit", ["1073741824", "max"])
def test_a_containers_limit_is_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    most, used = tmp_path / "memory.max", tmp_path / "memory.current"
    most.write_text(f"{limit}\n")
    used.write_text(str(GIB // 4))
    monkeypatch.setattr(host_memory, "_CGROUP_MEMORY", ((most, used), (tmp_path / "v1", tmp_path / "v1 used")))
    whole = psutil.virtual_memory().total
    expected = min(GIB, whole) if limit.isdigit() else whole
    assert host_memory.total_bytes() == expected
    if limit.isdigit():
        assert host_memory.available_bytes() <= GIB * 3 // 4


@pytest.mark.parametrize(
    ("statistics", "of_files"),
    [
        (None, 0),
        ("anon 99\nfile 700\nactive_file 300\ninactive_file 400\n", 700),
        ("active_file 1\ninactive_file 2\ntotal_active_file 300\ntotal_inactive_file 500\n", 800),
    ],
    ids=["not told", "second version", "first version"],
)
def test_what_a_container_keeps_of_files_is_there_for_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statistics: str | None, of_files: int
) -> None:
    most, used = tmp_path / "memory.max", tmp_path / "memory.current"
    most.write_text("1000\n")
    used.write_text("900\n")
    if statistics is not None:
        (tmp_path / "memory.stat").write_text(statistics)
    monkeypatch.setattr(host_memory, "_CGROUP_MEMORY", ((most, used),))
    assert host_memory.available_bytes() == 100 + of_files
