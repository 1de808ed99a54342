"""Sequences that wait for blocks: a line for each tenant, the highest priority first in it, then by arrival.

The grant policy chooses among the heads of the lines. `backfill.py` says who may pass one that does not fit.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from common.contracts.types import SequenceId
from kvmanager.contracts.sequence import Sequence

_Place = tuple[int, int, SequenceId]
_Arrival = tuple[int, SequenceId]
Key = TypeVar("Key", _Place, _Arrival)


class WaitingQueue:
    """Sorted lines. A sequence keeps its arrival for life, so a preempted sequence returns to its old place.

    `unexplained` are those whose wait has no decision record yet, in the order in which they joined. `admissions`
    counts those that got their blocks, by priority.
    """

    __slots__ = ("_arrivals", "_lines", "admissions", "unexplained")

    def __init__(self) -> None:
        self._lines: dict[str, list[_Place]] = {}
        self._arrivals: dict[str, list[_Arrival]] = {}
        self.unexplained: dict[SequenceId, None] = {}
        self.admissions: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[SequenceId]:
        return (place[2] for place in heapq.merge(*self._lines.values()))

    def heads(self) -> list[SequenceId]:
        """Return the first sequence of each tenant, of those with the highest priority of all that wait."""
        firsts = [line[0] for line in self._lines.values()]
        if len(firsts) < 2:
            return [first[2] for first in firsts]
        highest = min(first[0] for first in firsts)
        return [first[2] for first in firsts if first[0] == highest]

    def by_arrival(self) -> list[Iterator[SequenceId]]:
        """Return the sequences of each tenant in the order of their arrival, whatever their priorities."""
        return [(place[1] for place in line) for line in self._arrivals.values()]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._lines.setdefault(sequence.tenant, []), _place(sequence))
        bisect.insort(self._arrivals.setdefault(sequence.tenant, []), _arrival(sequence))
        self.unexplained[sequence.id] = None
        sequence.outranked = self._admitted_above(sequence.priority)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Raises ValueError when it does not wait."""
        _remove(self._lines, sequence, _place(sequence))
        _remove(self._arrivals, sequence, _arrival(sequence))
        self.unexplained.pop(sequence.id, None)

    def count_admission(self, sequence: Sequence) -> int:
        """Count the admission of a sequence; return how many of a higher priority came before since it joined."""
        self.admissions[sequence.priority] += 1
        return self._admitted_above(sequence.priority) - sequence.outranked

    def _admitted_above(self, priority: int) -> int:
        return sum(count for each, count in self.admissions.items() if each > priority)


def _remove(lines: dict[str, list[Key]], sequence: Sequence, key: Key) -> None:
    line = lines.get(sequence.tenant, [])
    index = bisect.bisect_left(line, key)
    if index == len(line) or line[index] != key:
        raise ValueError(f"{sequence.name} does not wait")
    del line[index]
    if not line:
        del lines[sequence.tenant]


def _place(sequence: Sequence) -> _Place:
    return (-sequence.priority, sequence.arrival, sequence.id)


def _arrival(sequence: Sequence) -> _Arrival:
    return (sequence.arrival, sequence.id)
