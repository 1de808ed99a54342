"""How many cores this process may use, and how several processes on one host share them. Standard library only."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# The same file in version 1 of control groups: microseconds, -1 without a quota.
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def usable_cores() -> int:
    """Return the cores that this process may run on, at least 1; the quota of a container counts as whole cores."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return able if quota is None else max(1, min(able, math.ceil(quota)))


def threads_of_each(workers: int = 1, cores: int | None = None) -> int:
    """Return the engine threads of each of so many workers on this host: all cores but one, shared.

    With a thread for every core, one busy neighbour (a worker's I/O thread, the router, the manager) stalls each
    parallel region: its slowest thread is the one that shares a core.
    """
    return max(1, ((usable_cores() if cores is None else cores) - 1) // workers)


def _quota() -> float | None:
    """Return the cores of a cgroup's quota; None without one."""
    try:
        if _CGROUP_QUOTA.exists():
            quota, period = _CGROUP_QUOTA.read_text().split()
        else:
            quota, period = ((_CGROUP_V1 / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return cores if cores > 0 else None
