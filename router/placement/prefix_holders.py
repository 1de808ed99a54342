"""How many leading blocks of a prefix each worker holds, from the index entries of their hashes.

The router reads windows of 32, 128 and then 512 block hashes. It stops at the first window of which no worker holds
every block: a worker that lacks a block cannot use any later one.

Where the index is of windows or chunks, a worker can use blocks whose ancestors are gone (`run_search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

WINDOWS = (32, 128, 512)

Entry = tuple[int, int]
"""(slot, generation)"""


def windows(length: int) -> Iterator[range]:
    """Return the positions of each window over `length` blocks."""
    start, number = 0, 0
    while start < length:
        size = WINDOWS[min(number, len(WINDOWS) - 1)]
        yield range(start, min(start + size, length))
        start, number = start + size, number + 1


class PrefixHolders:
    """Collects values window by window. `live` gives (worker id, generation) by slot; other entries do not count."""

    def __init__(self, live: Mapping[int, tuple[str, int]], unpack: Callable[[bytes], Sequence[Entry]]) -> None:
        self._live, self._unpack = live, unpack
        self._alive: dict[Entry, str] | None = None
        self._depth = 0
        self._last: bytes | None = None
        self._hits: dict[str, int] = {}
        # Slots of the first block whose entries do not count: their owners may be newer than `live`.
        self.unknown: set[int] = set()

    def feed(self, values: Sequence[bytes | None]) -> bool:
        """Take the values of the next keys; return whether some worker holds all blocks so far."""
        for value in values:
            # Neighbouring blocks mostly have the same holders, and so the same bytes.
            if value != self._last or self._alive is None:
                self._narrow(self._unpack(value) if value else ())
                self._last = value
            if not self._alive:
                return False
            self._depth += 1
        return bool(self._alive)

    def hits(self) -> dict[str, int]:
        """Return the number of leading blocks by worker id; workers with none are left out."""
        hits = self._hits | dict.fromkeys((self._alive or {}).values(), self._depth)
        return {worker_id: blocks for worker_id, blocks in hits.items() if blocks}

    def _narrow(self, entries: Sequence[Entry]) -> None:
        """Drop the workers that do not hold the block at the current depth; their hits end here."""
        if self._alive is None:
            counting = [entry for entry in entries if self._live.get(entry[0], _NOBODY)[1] == entry[1]]
            self._alive = {entry: self._live[entry[0]][0] for entry in counting}
            self.unknown = {entry[0] for entry in entries if entry not in self._alive}
            return
        for entry in self._alive.keys() - entries:
            self._hits[self._alive.pop(entry)] = self._depth


_NOBODY = ("", -1)
