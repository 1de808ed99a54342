"""Time as a dependency: the pure cores take a Clock, services pass SystemClock, tests pass ManualClock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start, never going backwards, and wall-clock nanoseconds for records."""

    def monotonic(self) -> float: ...

    def time_ns(self) -> int: ...


def until_tick(now: float, every: float) -> float:
    """Return the seconds to the next tick, which is due at multiples of `every` on the clock that all processes share.

    A thread that wakes up costs, and after a message threads of gRPC look for more, for a second and more. So an idle
    process does what is periodic at one moment. At rest, moments of their own took three times the wake-ups.
    """
    pause = every - now % every if every else 0.0
    return pause if pause > every / 8 else pause + every  # a timer may fire a little early


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def time_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that moves only by calls; for tests and the executable model."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def advance(self, seconds: float) -> None:
        self.now += seconds
