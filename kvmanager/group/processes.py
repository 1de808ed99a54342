"""Names of owners of a lease, which prove to other processes of the same machine that one has ended.

A name says the machine since its start with its namespaces, the number of the process, and when the process began. It
proves nothing elsewhere: in another container, on another machine, or where there is no Linux. A container that starts
again has a new namespace, so its last process is not found there.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_NAME: Final = re.compile(r"\S*@([0-9a-f]{32})\.([1-9][0-9]{0,9})\.([0-9]{1,20})")
_ENDED_STATES: Final = ("Z", "X")
# Fields of /proc/PID/stat after the name of the program, which may have blanks and brackets.
_STATE, _THREADS, _BEGAN = 0, 17, 19


def owner_name(source: str) -> str:
    """Return a name of this process that begins with `source`. Without /proc it is `source` alone: no proof."""
    with suppress(OSError, ValueError):
        pid = os.getpid()
        if int((_PROC / "self").readlink().name) == pid:  # else /proc is that of another namespace
            return f"{source}@{_machine()}.{pid}.{_stat(pid)[_BEGAN]}"
    return source


def has_ended(owner: str) -> bool:
    """Return whether the process with this name has ended for certain."""
    found, own = _NAME.fullmatch(owner), _NAME.fullmatch(owner_name(""))
    if found is None or own is None or found[1] != own[1]:
        return False
    pid = int(found[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # it is another user's
        pass
    try:
        stat = _stat(pid)
    except (OSError, ValueError):  # it has ended since, or is hidden
        return False
    # The threads of a process may outlive its first one.
    ended = stat[_STATE] in _ENDED_STATES and int(stat[_THREADS]) <= 1
    return ended or stat[_BEGAN] != found[3]


def _machine() -> str:
    """Return a name of this machine since its start, and of the namespaces in which the numbers above count."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(_PROC / "self/ns/pid")]
    with suppress(OSError):  # older kernels have no namespaces of time
        namespaces.append(os.readlink(_PROC / "self/ns/time"))
    return hashlib.blake2b("\n".join([boot, *namespaces]).encode(), digest_size=16).hexdigest()


def _stat(pid: int) -> list[str]:
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    if len(fields) <= _BEGAN:
        raise ValueError(f"/proc/{pid}/stat has {len(fields)} fields after the name")
    return fields
