"""Merges several streams of events, for requests of several prompts. All end when one fails or the reader stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

T = TypeVar("T")

# Events that wait for the reader. Further ones wait in their streams, whose own bounds then count.
_MOST_WAITING: Final = 16


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (number of the stream, event) as events come. Raises the error of the first failing stream."""
    if len(streams) == 1:
        # The common case: without a task, and without reading ahead of the client.
        async with aclosing(streams[0]) as stream:
            async for event in stream:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    places = asyncio.Semaphore(_MOST_WAITING)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for event in stream:
                await places.acquire()
                ready.put_nowait((number, event))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(ready.put_nowait)
    try:
        running = len(pumps)
        while running:
            item = await ready.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                places.release()
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
