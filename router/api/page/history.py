"""Figures of this router over the last minutes: a sample every two seconds, and the rates and percentiles between them.

The ring is bounded. Rates are between two samples; percentiles are of the last WINDOW_S seconds before a sample.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from common.contracts.clock import until_tick

EVERY_S: Final = 2.0
WINDOW_S: Final = 30.0
KEPT: Final = 300

Buckets = tuple[tuple[float, float], ...]
"""Upper bound, and how many observations since the start are at most that; the last bound is infinite."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the router has counted until `at`, in wall-clock seconds, and what it holds then.

    `running` and `waiting` are sequences, as the workers last said, and those that wait for a worker. `stored` are
    tokens of sequences with blocks, `paged` the slots of as many whole blocks. Contiguous reservations would take
    `contiguous` slots for the greatest length of each sequence, `context` for that of the model.
    """

    at: float
    tokens: float
    first_token: Buckets = ()
    gap: Buckets = ()
    running: int = 0
    waiting: int = 0
    stored: int = 0
    paged: int = 0
    contiguous: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of the charts. None: nothing was observed in the window."""

    at: float
    tokens_per_s: float
    first_p50: float | None
    first_p95: float | None
    gap_p50: float | None
    gap_p95: float | None
    running: int
    waiting: int
    stored: int
    paged: int
    contiguous: int
    context: int


class History:
    """The newest KEPT samples."""

    def __init__(self, take: Callable[[], Sample]) -> None:
        self._take, self._samples = take, deque[Sample](maxlen=KEPT)

    async def run(self) -> None:
        """Take samples for ever."""
        while True:
            self.add(self._take())
            await asyncio.sleep(until_tick(time.monotonic(), EVERY_S))

    def add(self, sample: Sample) -> None:
        """Add a sample; one that is not later than the last replaces all, because the clock was set back."""
        if self._samples and sample.at <= self._samples[-1].at:
            self._samples.clear()
        self._samples.append(sample)

    def points(self) -> list[Point]:
        return list(self.each_point())

    def each_point(self) -> Iterator[Point]:
        """Yield the points of the samples that there are now; each costs some 50 microseconds."""
        return _points(list(self._samples))


def _points(samples: list[Sample]) -> Iterator[Point]:
    start = 0
    for index, (before, now) in enumerate(pairwise(samples), 1):
        while start < index - 1 and samples[start].at < now.at - WINDOW_S:
            start += 1
        first, gap = (_between(getattr(samples[start], each), getattr(now, each)) for each in ("first_token", "gap"))
        yield Point(
            at=now.at,
            tokens_per_s=max(0.0, now.tokens - before.tokens) / (now.at - before.at),
            first_p50=quantile(first, 0.5),
            first_p95=quantile(first, 0.95),
            gap_p50=quantile(gap, 0.5),
            gap_p95=quantile(gap, 0.95),
            running=now.running,
            waiting=now.waiting,
            stored=now.stored,
            paged=now.paged,
            contiguous=now.contiguous,
            context=now.context,
        )


def _between(before: Buckets, after: Buckets) -> Buckets:
    """Return the observations between two samples; all of the later one where a bound is missing in the first."""
    earlier = dict(before)
    return tuple([(bound, count - earlier.get(bound, 0.0)) for bound, count in after])


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return the value below which a share of the observations lies, linear within its bucket; None without any.

    Observations beyond the last finite bound count as that bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0.0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * total and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (share * total - below) / (count - below)
        lower, below = bound, count
    return lower


class Slots(NamedTuple):
    """Slots of live sequences, named as in `Sample`."""

    stored: int
    paged: int
    contiguous: int
    context: int


def slots(lengths: Iterable[tuple[int, int]], block_size: int, context: int) -> Slots:
    """Return the slots of sequences by tokens and greatest length; `context` is the greatest length of the model."""
    stored = paged = contiguous = whole = 0
    for tokens, most in lengths:
        stored += tokens
        paged += -(-tokens // block_size) * block_size
        contiguous += max(tokens, most)
        whole += max(tokens, context)
    return Slots(stored, paged, contiguous, whole)
