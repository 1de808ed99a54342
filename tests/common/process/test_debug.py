"""Dumps of a real process on a signal: while it runs, while its event loop is blocked, and with many tasks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.commands.debug import dump, main, services
from common.contracts.errors import NotFound
from common.process import die_with_parent
from common.process.debug import MAX_FRAMES, MAX_TASKS

PROGRAM = """
import asyncio, sys, threading, time
from pathlib import Path
from common.process.debug import dumps_on_signal, stacks_on_signal
from common.rpc import event_loop

def deep(depth):
    if depth:
        deep(depth - 1)
    else:
        print("READY", flush=True)
        time.sleep(60)

async def waits_for_a_secret(begun, secret="do not print me"):
    begun.release()
    await asyncio.sleep(60)

async def serve():
    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(waits_for_a_secret(begun)) for _ in range(int(sys.argv[2]))]
    dumps_on_signal("test", "127.0.0.1:9", Path(sys.argv[1]), lambda: {"queued": 3})
    for _ in tasks:
        await begun.acquire()
    if sys.argv[3] == "blocked":
        deep(100)
    print("READY", flush=True)
    await asyncio.gather(*tasks)

stacks_on_signal()
event_loop.run(serve())
"""


@contextmanager
def process(folder: Path, tasks: int, how: str) -> Iterator[subprocess.Popen[str]]:
    command = die_with_parent.command([sys.executable, "-P", "-c", PROGRAM, str(folder), str(tasks), how])
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "READY\n"
        try:
            yield running
        finally:
            running.kill()


def only(folder: Path) -> dict[str, Any]:
    (service,) = services(folder, None)
    return dump(service, patience=60.0)


def test_a_dump_has_threads_tasks_and_state(tmp_path: Path) -> None:
    with process(tmp_path, 2, "free") as running:
        found = only(tmp_path)
        assert (found["service"], found["address"], found["pid"]) == ("test", "127.0.0.1:9", running.pid)
        assert any("MainThread" in name for name in found["threads"])
        waiting = [stack for stack in found["tasks"].values() if "waits_for_a_secret" in stack[0]]
        assert len(waiting) == 2
        assert "sleep" in waiting[0][-1]
        assert found["state"] == {"queued": 3}
        assert "do not print me" not in json.dumps(found)
        assert only(tmp_path)["state"] == {"queued": 3}  # it goes on, and answers again


def test_a_blocked_event_loop_shows_where_it_blocks_and_the_output_is_bounded(tmp_path: Path) -> None:
    with process(tmp_path, MAX_TASKS + 50, "blocked"):
        found = only(tmp_path)
        stack = next(stack for name, stack in found["threads"].items() if "MainThread" in name)
        assert "in deep" in stack[-1]
        assert len(stack) == MAX_FRAMES + 1
        assert "left out" in stack[0]
        assert len(found["tasks"]) == MAX_TASKS + 1
        assert "51 more tasks are left out" in found["tasks"]


def test_sigusr1_writes_stacks_to_stderr_and_ends_nothing(tmp_path: Path) -> None:
    with process(tmp_path, 1, "blocked") as running:
        running.send_signal(signal.SIGUSR1)
        only(tmp_path)  # so the signal before it has been handled
        running.kill()
        assert running.stderr is not None
        words = running.stderr.read()
    assert "most recent call first" in words
    assert "in deep" in words


def test_a_stopped_service_is_said_to_give_no_answer(tmp_path: Path) -> None:
    with process(tmp_path, 1, "free") as running:
        running.send_signal(signal.SIGSTOP)
        (service,) = services(tmp_path, "127.0.0.1:9")
        assert "no answer within 0.2 s" in dump(service, patience=0.2)["error"]


def test_services_with_state_directories_below_that_of_their_suite_are_found(tmp_path: Path) -> None:
    """Each further KV manager of a suite has one: `.quire/kvmanager/1`."""
    with process(tmp_path, 1, "free") as first, process(tmp_path / "kvmanager" / "1", 1, "free") as second:
        found = [dump(each, patience=60.0) for each in services(tmp_path, None)]
        assert [each["pid"] for each in found] == [first.pid, second.pid]
        assert [each["state"] for each in found] == 2 * [{"queued": 3}]


def test_processes_that_ended_are_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(tmp_path, 1, "free"), pytest.raises(NotFound, match=r"running: 127\.0\.0\.1:9"):
        services(tmp_path, "127.0.0.1:10")
    with pytest.raises(NotFound, match="running: none"):
        services(tmp_path, None)
    assert main(["dump", "--state-dir", str(tmp_path)]) == 1
    assert "send SIGUSR1" in capsys.readouterr().err
