"""Notices when the process stood still: it was stopped, or its host gave it no processor.

A timer of the event loop ticks while there is work. One that fires much too late tells that nothing ran meanwhile. In
an idle process the watchdog's timer does, once a second. Times are readings of time.monotonic; any thread may ask, and
may add what it noticed itself.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

_TICK_S: Final = 0.05
# A timer that is late by less fires behind ordinary work of the loop.
_LATE_S: Final = 0.1
# Spans of time that are remembered; those before them are older than any request of interest.
_LATEST: Final = 64


class _Span(NamedTuple):
    """A standstill, and when the process was last known to run before it."""

    begin: float
    end: float
    ran: float


class Standstill:
    """`works` says whether there is work, for which the timer ticks on."""

    def __init__(self, works: Callable[[], bool] = lambda: False) -> None:
        self._works = works
        self._spans: deque[_Span] = deque(maxlen=_LATEST)
        self._seconds, self._until = 0.0, -math.inf
        # When the next tick is due; None while there is no work.
        self._due: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Watch from now on until there is no work. Idempotent; the event loop calls it."""
        if self._due is None:
            self._next(time.monotonic())

    def add(self, begin: float, end: float, ran: float | None = None) -> None:
        """Note that nothing went on from one time to another; what is known of that time already counts once.

        `ran`: when the process was last known to run before, if that is earlier.
        """
        with self._lock:
            known, begin = self._until, max(begin, self._until)
            if end > begin:
                self._spans.append(_Span(begin, end, max(known, begin if ran is None else ran)))
                self._seconds += end - begin
                self._until = end

    def ticked(self, began: float, pause: float, now: float) -> None:
        """Note that a timer of so many seconds, which began then, fires now."""
        if now - began - pause > _LATE_S:
            self.add(began + pause, now, began)

    def seconds(self, now: float) -> float:
        """Return the seconds of all standstills until now: it only rises."""
        return self._seconds + self.present(now)

    def present(self, now: float) -> float:
        """Return for how long the process has stood still until now; 0 where a tick has come since."""
        due = self._due
        return 0.0 if due is None or now - due <= _LATE_S else max(0.0, now - max(due, self._until))

    def between(self, begin: float, end: float) -> float:
        """Return the seconds between two times in which the process stood still."""
        return sum(max(0.0, min(end, span.end) - max(begin, span.begin)) for span in self._known(end))

    def just_before(self, moment: float) -> float:
        """Return for how long at most the process had stood still when something came that may have waited for it."""
        just = [span for span in self._known(moment) if span.begin < moment < span.end + _LATE_S]
        return max((min(moment, span.end) - span.ran for span in just), default=0.0)

    def _known(self, now: float) -> list[_Span]:
        with self._lock:
            spans, late = list(self._spans), self.present(now)
        return [*spans, _Span(now - late, now, now - late - _TICK_S)] if late else spans

    def _tick(self) -> None:
        now, due = time.monotonic(), self._due or 0.0
        self.ticked(due - _TICK_S, _TICK_S, now)
        if self._works():
            self._next(now)
        else:
            self._due = None

    def _next(self, now: float) -> None:
        self._due = now + _TICK_S
        asyncio.get_running_loop().call_later(_TICK_S, self._tick)
