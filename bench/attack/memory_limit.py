"""A limit of memory for processes that run already, as a container has one: a cgroup, which needs root on Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

# Of version 1 and of version 2.
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_PATIENCE_S: Final = 10.0


@contextmanager
def memory_limit(processes: Iterable[int], size: int) -> Iterator[None]:
    """Give each of these processes, and what it starts meanwhile, `size` bytes of its own.

    What a process has already stays charged to where it ran, so its limit is lower by that. The kernel kills what takes
    more. Raises OSError where this process may make no cgroup.
    """
    made: list[Path] = []
    try:
        made.extend(_cgroup(process, size) for process in processes)
        yield
    finally:
        for folder in made:
            _remove(folder)


def _cgroup(process: int, size: int) -> Path:
    old = (_V1 / "memory.limit_in_bytes").exists()
    folder = (_V1 if old else _V2) / f"quire-attacks-{os.getpid()}-{process}"
    folder.mkdir()
    rest = size - int(psutil.Process(process).memory_info().rss)
    (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(rest))
    (folder / "cgroup.procs").write_text(str(process))
    return folder


def _remove(folder: Path) -> None:
    """Move what still runs out of a cgroup, and remove it: it can be removed once it is empty."""
    ends = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends:
        for process in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (folder.parent / "cgroup.procs").write_text(process)
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
