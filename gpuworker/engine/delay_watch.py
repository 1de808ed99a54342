"""Watches what holds sequences up for want of blocks: a KV manager that is away, and an empty pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from common.contracts.types import SequenceId
from gpuworker.engine.ports import Delayed

# Seconds below which a delay is told with the next one.
_LEAST_S: Final = 0.02


class DelayWatch:
    """A step costs nothing here while every sequence has blocks. Times are readings of Clock.monotonic.

    `away` returns the seconds between two times in which no KV manager answered.
    """

    def __init__(self, away: Callable[[float, float], float]) -> None:
        self._away = away
        # Since when sequences wait to be admitted, and since when those that run have no block.
        self._waiting: dict[SequenceId, float] = {}
        self._stalled: dict[SequenceId, float] = {}
        # Delays of sequences that run again, and were too short to be told.
        self._untold: dict[SequenceId, Delayed] = {}

    def waits(self, sequence: SequenceId, now: float) -> None:
        """Watch a sequence that waits to be admitted, from now on if it did not before."""
        self._waiting.setdefault(sequence, now)

    def admitted(self, sequence: SequenceId, now: float) -> Iterator[Delayed]:
        """Yield what of a sequence's wait the manager was away."""
        since = self._waiting.pop(sequence, now)
        if now > since and (away := self._away(since, now)) > 0.0:
            yield Delayed(sequence, 0.0, away)

    def planned(self, stalled: Collection[SequenceId], now: float) -> Iterator[Delayed]:
        """Yield the delays of sequences that have blocks again; `stalled` are those that have none."""
        if self._stalled or stalled:
            for sequence in self._stalled.keys() - stalled:
                yield from self._told(self._ended(sequence, now), _LEAST_S)
            for sequence in stalled:
                self._stalled.setdefault(sequence, now)

    def left(self, sequence: SequenceId, now: float) -> Iterator[Delayed]:
        """Yield the delays of a sequence that ended or lost its blocks, and forget it."""
        yield from self.admitted(sequence, now)
        if sequence in self._stalled:
            yield from self._told(self._ended(sequence, now), 0.0)
        elif (untold := self._untold.pop(sequence, None)) is not None:
            yield untold

    def _ended(self, sequence: SequenceId, now: float) -> Delayed:
        since = self._stalled.pop(sequence)
        before = self._untold.pop(sequence, Delayed(sequence, 0.0, 0.0))
        return Delayed(sequence, before.stalled + now - since, before.away + self._away(since, now))

    def _told(self, delay: Delayed, least: float) -> Iterator[Delayed]:
        if delay.stalled >= least:
            yield delay
        else:
            self._untold[delay.sequence] = delay
