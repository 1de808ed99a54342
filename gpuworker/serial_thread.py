"""A thread that runs callables in order: a queue without the futures and locks of an executor."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

log = logging.getLogger(__name__)


class SerialThread:
    """Runs callables one after the other, all of them `within` a context.

    They should not raise: an error ends up in the log, and the thread goes on, because others wait for what it does.
    The thread is a daemon: a step that hangs keeps no process from ending.
    """

    def __init__(self, name: str, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._within = within
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn, self._counting, self._unfinished = threading.Lock(), threading.Lock(), 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Queue work behind all earlier work."""
        with self._counting:
            self._unfinished += 1
            self._queue.put(work)

    def run(self, work: Callable[[], None]) -> None:
        """Do work behind all earlier work: outside of the context on the calling thread if there is none, else here."""
        if self.claim(work):
            self.do_claimed(work)

    def claim(self, work: Callable[[], None]) -> bool:
        """Return whether nothing is unfinished: the caller must then do the work soon. Else it is queued."""
        with self._counting:
            idle = not self._unfinished
            self._unfinished += 1
            if idle:
                self._turn.acquire()  # it is free, or about to be: nothing is unfinished
            else:
                self._queue.put(work)
        return idle

    def do_claimed(self, work: Callable[[], None]) -> None:
        """Do work that the calling thread has claimed; what was put since then follows."""
        try:
            work()
        except BaseException:
            log.critical("a callable of the thread %s failed", self._thread.name, exc_info=True)
        with self._counting:
            self._unfinished -= 1
        self._turn.release()

    def do_there(self, work: Callable[[], None]) -> None:
        """Do work on this thread: now, if it is the one that calls, else behind all earlier work."""
        if threading.current_thread() is self._thread:
            work()
        else:
            self.put(work)

    def close(self) -> None:
        """Finish the queued work, and end the thread; a second call does nothing."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        with self._within():
            while (work := self._queue.get()) is not None:
                self._turn.acquire()
                self.do_claimed(work)
                del work  # its objects must not live until the next callable arrives
