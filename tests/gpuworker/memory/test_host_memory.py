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
