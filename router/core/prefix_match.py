"""How many leading blocks of a prefix each worker holds, from the index entries of their hashes.

The router reads windows of 32, 128 and then 512 block hashes. It stops at the first window of which no worker holds
every block: a worker that lacks a block cannot use any later one.

Where every layer of the model has a window, a worker can use blocks whose ancestors are gone. Then the router reads all
windows, and counts the hits before the end of a run of blocks that reaches back as far as the next token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from common.lease import blocks_before_window

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


class PrefixMatch:
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
        for entry in [entry for entry in self._alive if entry not in entries]:
            self._hits[self._alive.pop(entry)] = self._depth


class RunMatch:
    """Does what PrefixMatch does where every layer has a window: hits end with a run of blocks of a worker.

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
        """`length` is the number of all block hashes; `window` and `block_size` are in slots."""
        self._live, self._unpack = live, unpack
        self._window, self._block_size, self._length = window, block_size, length
        self._depth = 0
        self._last: bytes | None = None
        self._began: dict[Entry, int] = {}
        self._ends: dict[Entry, int] = {}
        # Slots of which an entry does not count: their owners may be newer than `live`.
        self.unknown: set[int] = set()

    def feed(self, values: Sequence[bytes | None]) -> bool:
        """Take the values of the next keys; return True, because a later run may count whatever these are."""
        for value in values:
            # Neighbouring blocks mostly have the same holders, and so the same bytes.
            if value != self._last or not self._depth:
                self._change(self._unpack(value) if value else ())
                self._last = value
            self._depth += 1
        return True

    def hits(self) -> dict[str, int]:
        """Return the number of blocks that need not be computed by worker id; workers with none are left out."""
        ends = dict(self._ends)
        for entry, began in self._began.items():
            if self._counts(began, self._depth):
                ends[entry] = self._depth
        return {self._live[entry[0]][0]: end for entry, end in ends.items()}

    def _change(self, entries: Sequence[Entry]) -> None:
        """End the runs of the workers that do not hold the block at the current depth, and begin those of others."""
        holders = set()
        for entry in entries:
            if self._live.get(entry[0], _NOBODY)[1] == entry[1]:
                holders.add(entry)
            else:
                self.unknown.add(entry[0])
        for entry in self._began.keys() - holders:
            if self._counts(self._began.pop(entry), self._depth):
                self._ends[entry] = self._depth
        for entry in holders - self._began.keys():
            self._began[entry] = self._depth

    def _counts(self, began: int, end: int) -> bool:
        read = end - 1 if end == self._length else end
        return began <= blocks_before_window(read * self._block_size, self._window, self._block_size)


_NOBODY = ("", -1)
