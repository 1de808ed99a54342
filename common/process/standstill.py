"""Notices when the process stood still: it was stopped, or its host gave it no processor.

A timer of the event loop ticks while there is work. One that fires much too late tells that nothing ran meanwhile. An
idle process pays nothing. Times are readings of time.monotonic; any thread may ask, and may add what it noticed itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_TICK_S: Final = 0.05
# A timer that is late by less fires behind ordinary work of the loop.
_LATE_S: Final = 0.1
# Spans of time that are remembered; those before them are older than any request of interest.
_LATEST: Final = 64

StoodStill = Callable[[float, float], float]
"""Returns for how many seconds between two times the process stood still."""


class Standstill:
    """`works` says whether there is work, for which the timer ticks on."""

    def __init__(self, works: Callable[[], bool] = lambda: False) -> None:
        self._works = works
        self._spans: deque[tuple[float, float]] = deque(maxlen=_LATEST)
        self._seconds = self._until = 0.0
        # When the next tick is due; None while there is no work.
        self._due: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Watch from now on until there is no work. Idempotent; the event loop calls it."""
        if self._due is None:
            self._next(time.monotonic())

    def add(self, begin: float, end: float) -> None:
        """Note that nothing went on from one time to another; what is known of that time already counts once."""
        with self._lock:
            begin = max(begin, self._until)
            if end > begin:
                self._spans.append((begin, end))
                self._seconds += end - begin
                self._until = end

    def seconds(self, now: float) -> float:
        """Return the seconds of all standstills until now: it only rises."""
        return self._seconds + self.present(now)

    def present(self, now: float) -> float:
        """Return for how long the process has stood still until now; 0 where a tick has come since."""
        due = self._due
        return 0.0 if due is None or now - due <= _LATE_S else max(0.0, now - max(due, self._until))

    def between(self, begin: float, end: float) -> float:
        """Return the seconds between two times in which the process stood still."""
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self._known(end))

    def just_before(self, moment: float) -> float:
        """Return for how long the process had stood still when something came that may have waited for it."""
        just = [(first, min(last, moment)) for first, last in self._known(moment) if last > moment - _LATE_S]
        return sum(max(0.0, last - first) for first, last in just)

    def _known(self, now: float) -> list[tuple[float, float]]:
        with self._lock:
            return [*self._spans, (now - self.present(now), now)]

    def _tick(self) -> None:
        now = time.monotonic()
        if late := self.present(now):
            self.add(now - late, now)
        if self._works():
            self._next(now)
        else:
            self._due = None

    def _next(self, now: float) -> None:
        self._due = now + _TICK_S
        asyncio.get_running_loop().call_later(_TICK_S, self._tick)
