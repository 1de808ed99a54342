"""Turns of the event loop, for tests whose subject they are, and the states for which others wait instead of turns.

A test that counts turns passes or fails with each await that the code under test gains or loses. It waits until tasks
are blocked, or until the loop is idle. tests/structure/test_waiting.py lists the tests that may take turns, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.waiting import until


async def take_turn() -> None:
    """Let everything run once that is ready now."""
    await asyncio.sleep(0)


async def until_blocked(*tasks: asyncio.Future[Any]) -> None:
    """Return once each task waits for a future that somebody else must set, or has ended.

    After the cancellation of a task: once it has met the cancellation.
    """
    await until(lambda: all(map(_is_blocked, tasks)), every=0)


async def until_idle() -> None:
    """Return once nothing goes on by itself: what runs next waits for the caller, a timer, a socket or a thread.

    What has not happened by then does not happen without one of these.
    """
    loop: Any = asyncio.get_running_loop()
    await until(lambda: not loop._ready, every=0)


def _is_blocked(task: Any) -> bool:
    waits_for = task._fut_waiter
    return bool(task.done()) or (waits_for is not None and not waits_for.done())


class Turns:
    count = 0


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    """Yield how often a task that is always ready has run."""
    turns = Turns()

    async def run() -> None:
        while True:
            turns.count += 1
            await take_turn()

    task = asyncio.create_task(run())
    await until(lambda: turns.count)
    try:
        yield turns
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
