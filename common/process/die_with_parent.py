"""Runs a program so that it ends with the process that started it, even when that is killed: no server is left behind.

On Linux the kernel ends the program (PR_SET_PDEATHSIG). The kernel watches the *thread* that started the program, so
start it from a thread that lives as long as the process. Elsewhere the program runs unchanged. This file is also the
launcher: it sets the signal in the new process and lets the program replace it. Code between fork and exec mixes badly
with threads and gRPC.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def command(argv: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command that runs `argv` so that it gets `death_signal` when this process is gone."""
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *argv]


def _launch(parent: int, death_signal: int, argv: list[str]) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:  # else it died before the line above
        os.execvp(argv[0], argv)


if __name__ == "__main__":
    _launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
