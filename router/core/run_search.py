"""How many leading blocks of a prompt a worker need not compute, where every layer of the model has a window.

A run of blocks counts that reaches back from its end as far as the next token sees: r blocks with a window of W slots,
where r is (W - 1) / block size, rounded up. So a run that counts begins with the first block, or has r blocks at least.
Each run that counts therefore has one of the blocks 0, r, 2r, ... These are read first. Further blocks are read only
beside those that a worker holds, the deepest first, until its deepest run that counts is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from common.lease import blocks_before_window
from router.core.prefix_match import WINDOWS, Entry

_NOBODY: Final = ("", -1)
_NONE: Final = frozenset[Entry]()
_MOST: Final = WINDOWS[-1]
"""Blocks that are wanted at once."""


class RunSearch:
    """Says which blocks to read next, and counts the blocks before the end of each worker's deepest run.

    A run that ends with the last block counts only if the hits without that block would count too. For the manager
    gives no hit on the block of a prompt's last token, and a reader of hashes does not know which block that is.
    """

    def __init__(
        self,
        live: Mapping[int, tuple[str, int]],
        unpack: Callable[[bytes], Sequence[Entry]],
        window: int,
        block_size: int,
        length: int,
    ) -> None:
        """`live` gives (worker id, generation) by slot; other entries do not count.

        `length` is the number of all block hashes; `window` and `block_size` are in slots.
        """
        self._live, self._unpack = live, unpack
        self._window, self._block_size, self._length = window, block_size, length
        self._stride = max(1, -(-(window - 1) // block_size))
        # Live entries of each block that was read, and by stretch where they change: begin, end and entries.
        # A stretch goes from one of the blocks 0, r, 2r, ... to the block before the next of them.
        self._holders: dict[int, frozenset[Entry]] = {}
        self._changes: dict[int, list[tuple[int, int, frozenset[Entry]]]] = {}
        self._last: tuple[bytes | None, frozenset[Entry]] = (None, _NONE)
        self._queue = list(range(0, length, self._stride))
        # The stretches that were asked for whole; the stretch to look at for each entry whose deepest run that counts
        # is not known; and the ends of the runs that are known.
        self._asked: set[int] = set()
        self._open: dict[Entry, int] = {}
        self._ends: dict[Entry, int] = {}
        # Whether blocks 0, r, 2r, ... were read.
        self.probed = not self._queue
        # Slots of which an entry does not count: their owners may be newer than `live`.
        self.unknown: set[int] = set()

    def wanted(self) -> list[int]:
        """Return the places of the blocks to read next; none when all hits are known."""
        return self._queue[:_MOST]

    def feed(self, values: Sequence[bytes | None]) -> None:
        """Take the values of the wanted blocks, or of the first ones of them."""
        self._changes.clear()
        for place, value in zip(self._queue[: len(values)], values, strict=True):
            # Neighbouring blocks mostly have the same holders, and so the same bytes.
            if value != self._last[0]:
                self._last = value, self._counting(self._unpack(value) if value else ())
            self._holders[place] = self._last[1]
        del self._queue[: len(values)]
        if not self._queue and not self.probed:
            self.probed, self._open = True, self._deepest()
        while self._open and not self._queue:
            self._ask_further()

    def hits(self) -> dict[str, int]:
        """Return the number of blocks that need not be computed by worker id; workers with none are left out.

        If the search is not at its end, the hits are those that the blocks read so far prove.
        """
        ends = dict(self._ends)
        for entry, deepest in (self._open if self.probed else self._deepest()).items():
            known = (self._end_of_run(entry, stretch) for stretch in self._held_from(entry, deepest))
            if end := next(filter(None, known), 0):
                ends[entry] = end
        return {self._live[entry[0]][0]: end for entry, end in ends.items()}

    def _deepest(self) -> dict[Entry, int]:
        """Return the deepest stretch whose first block each entry holds."""
        found, last = dict[Entry, int](), _NONE
        for place in reversed(range(0, self._length, self._stride)):
            holders = self._holders.get(place, _NONE)
            if holders is not last:
                found.update(dict.fromkeys(holders - found.keys(), place // self._stride))
                last = holders
        return found

    def _held_from(self, entry: Entry, deepest: int) -> Iterator[int]:
        """Yield the stretches whose first block an entry holds, from one back to the first one."""
        held = self._holders
        return (each for each in range(deepest, -1, -1) if entry in held.get(each * self._stride, _NONE))

    def _counting(self, entries: Sequence[Entry]) -> frozenset[Entry]:
        counting = set()
        for entry in entries:
            if self._live.get(entry[0], _NOBODY)[1] == entry[1]:
                counting.add(entry)
            else:
                self.unknown.add(entry[0])
        return frozenset(counting)

    def _ask_further(self) -> None:
        """Decide on what was read, and want what is needed beside that."""
        needed: set[int] = set()
        for entry in list(self._open):
            needed |= self._decide(entry)
        self._asked |= needed
        for stretch in sorted(needed, reverse=True):
            self._queue += self._places(stretch)[1:]

    def _decide(self, entry: Entry) -> set[int]:
        """Look for the deepest run of an entry; return the stretches to read before that can be decided."""
        for stretch in self._held_from(entry, self._open.pop(entry)):
            if missing := {stretch, max(0, stretch - 1)} - self._asked:
                self._open[entry] = stretch
                return missing
            if end := self._end_of_run(entry, stretch):
                self._ends[entry] = end
                break
        return set()

    def _end_of_run(self, entry: Entry, stretch: int) -> int:
        """Return where the run ends that has the first block of a stretch; 0 if the run does not count.

        It ends within the stretch, or the entry's next stretch was looked at before. If it covers the stretch before,
        it is long enough. A block that was not read counts as not held.
        """
        gaps_before = (stop for _, stop, holders in self._changes_of(stretch - 1) if entry not in holders)
        begin = max(gaps_before, default=max(0, stretch - 1) * self._stride)
        gaps = (start for start, _, holders in self._changes_of(stretch) if entry not in holders)
        end = next(gaps, self._places(stretch).stop)
        return end if self._counts(begin, end) else 0

    def _changes_of(self, stretch: int) -> list[tuple[int, int, frozenset[Entry]]]:
        """Return the parts of a stretch whose blocks have the same holders; none before the first stretch."""
        if stretch not in self._changes:
            changes = self._changes[stretch] = list[tuple[int, int, frozenset[Entry]]]()
            for place in self._places(stretch) if stretch >= 0 else ():
                holders = self._holders.get(place, _NONE)
                if changes and holders is changes[-1][2]:
                    changes[-1] = changes[-1][0], place + 1, holders
                else:
                    changes.append((place, place + 1, holders))
        return self._changes[stretch]

    def _places(self, stretch: int) -> range:
        return range(stretch * self._stride, min((stretch + 1) * self._stride, self._length))

    def _counts(self, begin: int, end: int) -> bool:
        read = end - 1 if end == self._length else end
        return begin <= blocks_before_window(read * self._block_size, self._window, self._block_size)
