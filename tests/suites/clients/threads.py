"""Runs servers beside the tests, in a thread with a loop of its own: clients in other processes call them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_a_thread(make: Callable[[], AbstractAsyncContextManager[T]], patience: float) -> Iterator[T]:
    """Enter what `make` makes in a thread, within `patience` seconds; yield what it gives until the context ends."""
    started: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with make() as made:
            started.set_result((made, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # the waiting caller of the start must get it
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="served")
    thread.start()
    try:
        made, loop, stop = started.result(patience)
        try:
            yield made
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join()
