"""Sequences that wait for blocks: a line for each tenant, the highest priority first in it, then by arrival.

The grant policy chooses among the heads of the lines. No head is passed over: it waits until it fits.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from common.types import SequenceId
from kvmanager.core.sequence import Sequence

_Place = tuple[int, int, SequenceId]


class WaitingQueue:
    """Sorted lines. A sequence keeps its arrival for life, so a preempted sequence returns to its old place.

    `unexplained` are those whose wait has no decision record yet, in the order in which they joined.
    """

    __slots__ = ("_lines", "unexplained")

    def __init__(self) -> None:
        self._lines: dict[str, list[_Place]] = {}
        self.unexplained: dict[SequenceId, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[SequenceId]:
        return (place[2] for place in sorted(place for line in self._lines.values() for place in line))

    def heads(self) -> list[SequenceId]:
        """Return the first sequence of each tenant, of those with the highest priority of all that wait."""
        firsts = [line[0] for line in self._lines.values()]
        if len(firsts) < 2:
            return [first[2] for first in firsts]
        highest = min(first[0] for first in firsts)
        return [first[2] for first in firsts if first[0] == highest]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._lines.setdefault(sequence.tenant, []), _place(sequence))
        self.unexplained[sequence.id] = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Raises ValueError when it does not wait."""
        place, line = _place(sequence), self._lines.get(sequence.tenant, [])
        index = bisect.bisect_left(line, place)
        if index == len(line) or line[index] != place:
            raise ValueError(f"{sequence.name} does not wait")
        del line[index]
        self.unexplained.pop(sequence.id, None)
        if not line:
            del self._lines[sequence.tenant]


def _place(sequence: Sequence) -> _Place:
    return (-sequence.priority, sequence.arrival, sequence.id)
