"""The memory of this machine and of this process, in bytes; importable without torch."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

# Limit and use of a container's memory in bytes, in the second and in the first version of control groups.
_CGROUP_MEMORY: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


# Of the statistics beside the use, what is kept of files. The system drops that when a process asks for memory.
_OF_FILES: Final = ("active_file", "inactive_file")


def available_bytes() -> int:
    """Return the memory that processes can still take; a container's limit counts, what is kept of files does not."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used in _CGROUP_MEMORY:
        if limit.is_file() and (most := limit.read_text().strip()).isdigit():
            taken = int(used.read_text()) - _bytes_of_files(used.with_name("memory.stat"))
            available = min(available, max(0, int(most) - taken))
    return available


def _bytes_of_files(statistics: Path) -> int:
    """Return what a container keeps of files; `total_` are the figures of the first version, with those below it."""
    if not statistics.is_file():
        return 0
    found = dict(line.split() for line in statistics.read_text().splitlines())
    return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in _OF_FILES)


def total_bytes() -> int:
    """Return the memory of this machine, or of this container where it has a limit."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for limit, _ in _CGROUP_MEMORY:
        if limit.is_file() and (most := limit.read_text().strip()).isdigit():
            total = min(total, int(most))
    return total


def address_space() -> int | None:
    """Return the bytes of addresses that this process may have (`ulimit -v`); None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
