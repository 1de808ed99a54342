"""Sequences that wait for blocks: the highest priority first, then by arrival.

No sequence is passed over: the head waits until it fits. Within a priority, a sequence waits only for earlier ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from common.types import SequenceId
from kvmanager.core.sequence import Sequence

_Place = tuple[int, int, SequenceId]


class WaitingQueue:
    """A sorted list. A sequence keeps its arrival for life, so a preempted sequence returns to its old place."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[SequenceId]:
        return (place[2] for place in self._places)

    @property
    def first(self) -> SequenceId:
        """The next sequence. Raises IndexError when none waits."""
        return self._places[0][2]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._places, _place(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Raises ValueError when it does not wait."""
        place = _place(sequence)
        index = bisect.bisect_left(self._places, place)
        if index == len(self._places) or self._places[index] != place:
            raise ValueError(f"{sequence.name} does not wait")
        del self._places[index]


def _place(sequence: Sequence) -> _Place:
    return (-sequence.priority, sequence.arrival, sequence.id)
