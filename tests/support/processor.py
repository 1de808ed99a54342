"""How slow this machine's processor is, for bounds of processor time: they are meant for the one they were taken on."""

from __future__ import annotations

import time

# Seconds of `_work` where the bounds were taken: 2 cores of an AMD EPYC.
_USUAL_S = 0.005


def slowness() -> float:
    """Return how many times as long as usual a fixed work takes here and now; 1 for a processor that is faster."""
    return max(1.0, min(_seconds() for _ in range(5)) / _USUAL_S)


def _seconds() -> float:
    began = time.thread_time()
    _work()
    return time.thread_time() - began


def _work() -> None:
    found: dict[int, str] = {}
    for number in range(50_000):
        found[number % 1000] = str(number)
