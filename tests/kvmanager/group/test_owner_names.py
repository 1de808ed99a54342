"""The name of a process proves on the same machine that the process has ended, and proves nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from kvmanager.group.processes import has_ended, owner_name

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the proof needs Linux's /proc")

PRINT_NAME = "from kvmanager.group.processes import owner_name; print(owner_name('m-1'), flush=True); input()"


def started() -> tuple[subprocess.Popen[str], str]:
    """Start a process that prints its name and waits; return both."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT_NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_process_lives_while_it_stands_still_and_has_ended_once_it_is_killed() -> None:
    process, name = started()
    assert re.fullmatch(rf"m-1@[0-9a-f]{{32}}\.{process.pid}\.[0-9]+", name)
    assert not has_ended(name)
    process.send_signal(signal.SIGSTOP)
    assert not has_ended(name)
    end(process)
    assert has_ended(name)


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    process, name = started()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert has_ended(name)
    end(process)


def test_another_process_with_the_same_number_is_another_process() -> None:
    machine, pid, began = owner_name("m").split(".")
    assert not has_ended(f"{machine}.{pid}.{began}")
    assert has_ended(f"{machine}.{pid}.{int(began) - 1}")


@pytest.mark.parametrize("change", ["machine", "no number", "number too large", "without", "more", "zero"])
def test_what_is_no_name_of_this_machine_proves_nothing(change: str) -> None:
    process, name = started()
    end(process)
    machine, pid, began = name.split(".")
    other = {
        "machine": f"m-1@{'0' * 32}.{pid}.{began}",
        "no number": f"{machine}.x.{began}",
        "number too large": f"{machine}.{10**10}.{began}",
        "without": "m-1",
        "more": f"{name}.1",
        "zero": f"{machine}.0.{began}",
    }[change]
    assert has_ended(name)
    assert not has_ended(other)
