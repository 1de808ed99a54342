"""Limits of a running process that are lowered for a while: no more files, memory, or bytes on disk."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

_CONNECTIONS: Final = 64
# Files that the process may still open, so that the first of the connections come through.
_LEFT: Final = 4


@contextmanager
def lowered(pid: int, limit: int, soft: int) -> Iterator[None]:
    """Lower a soft limit of a process, and set it back, unless the process has ended."""
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (soft, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, limit, before)


@contextmanager
def without_files(pid: int, addresses: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Let a process have almost no file descriptor left, and take those by connections to its ports."""
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    with ExitStack() as stack:
        stack.enter_context(lowered(pid, resource.RLIMIT_NOFILE, files + _LEFT))
        for address in addresses:
            for _ in range(_CONNECTIONS):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(address)
        yield


@contextmanager
def without_disk(pid: int) -> Iterator[None]:
    """Let a process write to no file, as on a full disk."""
    with lowered(pid, resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def without_memory(pid: int) -> Iterator[None]:
    """Let a process get no further memory from the system: neither its address space nor its data may grow."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now = {line[0]: int(line[1]) << 10 for line in lines if line[0] in ("VmSize:", "VmData:")}
    with lowered(pid, resource.RLIMIT_AS, now["VmSize:"]), lowered(pid, resource.RLIMIT_DATA, now["VmData:"]):
        yield
