"""Counts the turns of the event loop, so that tests need no wall clock to see whether others had one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    count = 0


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    """Yield how often a task that is always ready has run."""
    turns = Turns()

    async def run() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
