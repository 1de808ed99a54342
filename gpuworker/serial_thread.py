"""A thread that runs callables in order: a queue without the futures and locks of an executor."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class SerialThread:
    """Runs callables one after the other, all of them `within` a context; they must not raise.

    The thread is a daemon: a step that hangs keeps no process from ending.
    """

    def __init__(self, name: str, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._within = within
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Queue work behind all earlier work."""
        self._queue.put(work)

    def close(self) -> None:
        """Finish the queued work, and end the thread; a second call does nothing."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        with self._within():
            while (work := self._queue.get()) is not None:
                work()
                del work  # its objects must not live until the next callable arrives
