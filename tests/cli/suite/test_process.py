"""A supervised child: started again with back-off, final when its options are bad, killed when it does not end."""

from __future__ import annotations

import asyncio
import sys

import pytest

from cli.suite.programs import Program
from cli.suite.stack import Child

SECONDS = 120.0
IGNORES_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
)


class Lines:
    """What a child said, and a way to wait for words of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._more = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, name: str, line: str) -> None:
        self.said.append(line)
        self._tasks.append(asyncio.create_task(self._notify()))

    async def _notify(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def until(self, line: str, times: int = 1) -> None:
        async with asyncio.timeout(SECONDS), self._more:
            await self._more.wait_for(lambda: self.said.count(line) >= times)


def program(script: str, quiet: bool = False) -> Program:
    return Program("child", "", (sys.executable, "-c"), (script,), "127.0.0.1:9", quiet=quiet)


@pytest.fixture
def lines() -> Lines:
    return Lines()


async def test_a_child_that_ends_is_started_again(lines: Lines) -> None:
    child = Child(program("print('here', flush=True); raise SystemExit(1)"), lines)
    child.ready = True
    await child.start()
    await lines.until("here", times=2)
    await child.stop()
    assert lines.said[:2] == ["here", "ended with status 1; starting it again in 0.5 s"]


async def test_a_child_that_refuses_its_options_is_final(lines: Lines) -> None:
    refused = asyncio.Event()
    child = Child(program("print('--port is bad'); raise SystemExit(2)"), lines, on_failed=lambda _: refused.set())
    await child.start()
    await asyncio.wait_for(refused.wait(), SECONDS)
    await child.stop()
    assert lines.said == ["--port is bad", "refused its options; it is not started again"]
    assert (child.restarts, child.last_lines) == (0, ["--port is bad"])


async def test_a_child_that_ends_before_it_was_ready_is_final(lines: Lines) -> None:
    failed = asyncio.Event()
    child = Child(program("raise SystemExit(1)"), lines, on_failed=lambda _: failed.set())
    await child.start()
    await asyncio.wait_for(failed.wait(), SECONDS)
    await child.stop()
    assert lines.said == ["ended with status 1; it is not started again"]


async def test_a_child_that_does_not_end_is_killed_after_its_time(lines: Lines) -> None:
    child = Child(program(IGNORES_SIGTERM), lines, patience=0.2)
    await child.start()
    await lines.until("here")
    await asyncio.wait_for(child.stop(), SECONDS)
    assert lines.said == ["here", "did not stop within 0.2 s; killing it"]
    assert child.pid is None


async def test_kill_does_not_wait_for_that_time(lines: Lines) -> None:
    child = Child(program(IGNORES_SIGTERM), lines, patience=10 * SECONDS)
    await child.start()
    await lines.until("here")
    stopping = asyncio.create_task(child.stop())
    child.kill()
    await asyncio.wait_for(stopping, SECONDS)
    assert lines.said == ["here"]
    assert child.restarts == 0


async def test_a_quiet_child_is_heard_only_when_it_ends(lines: Lines) -> None:
    script = "import os; print('here', flush=True); os.kill(os.getpid(), 9)"
    child = Child(program(script, quiet=True), lines)
    child.ready = True
    await child.start()
    await lines.until("started again on 127.0.0.1:9")
    await child.stop()
    assert child.last_lines[0] == "here"
    assert lines.said[:2] == ["killed by SIGKILL; starting it again in 0.5 s", "started again on 127.0.0.1:9"]
