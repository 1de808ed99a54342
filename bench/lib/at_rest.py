"""What a process and those that it started cost: seconds of processors, and how often their threads wake up (Linux)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_SWITCHES: Final = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


class Usage(NamedTuple):
    """Of all threads so far."""

    cpu_seconds: float
    wakeups: int


def usage_of(pid: int, proc: Path = _PROC, ticks: int = os.sysconf("SC_CLK_TCK")) -> Usage:
    """Return the usage of a process and of all below it. A thread that waits and goes on has woken up once."""
    cpu, wakeups = 0, 0
    for each in processes(pid, proc):
        fields = (proc / str(each) / "stat").read_text().rpartition(")")[2].split()
        cpu += int(fields[11]) + int(fields[12])  # user and system
        for task in (proc / str(each) / "task").iterdir():
            found = _SWITCHES.search((task / "status").read_text())
            wakeups += int(found[1]) if found else 0
    return Usage(cpu / ticks, wakeups)


def processes(pid: int, proc: Path = _PROC) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for task in (proc / str(pid) / "task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes(int(child), proc)


def rest(pid: int, seconds: float) -> dict[str, float]:
    """Look at a process for so long; return the share of a core that it took, and its wake-ups a second."""
    before, began = usage_of(pid), time.monotonic()
    time.sleep(seconds)
    after, passed = usage_of(pid), time.monotonic() - began
    return {
        "idle_cpu_percent": 100 * (after.cpu_seconds - before.cpu_seconds) / passed,
        "idle_wakeups_per_s": (after.wakeups - before.wakeups) / passed,
    }
