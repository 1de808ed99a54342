"""A sequence's blocks in one group of layers, as pages, where the pool has groups; and the tail of its states."""

from __future__ import annotations

from collections.abc import Sequence as Items

from common.contracts.types import TRIMMED, BlockId


class GroupTable:
    """The pages of a sequence's blocks in one group, `size` a block; `trimmed` leading blocks are TRIMMED.

    A table of `checkpoints` has a block only where the sequence goes on from one, or is to leave one. It names blocks
    by their first pages, and `size` is 1: a checkpoint may have hundreds of pages, and most places have none.
    """

    __slots__ = ("_snapshot", "checkpoints", "pages", "size", "trimmed")

    def __init__(self, pages: int, checkpoints: bool = False) -> None:
        """`pages` are those of a block."""
        self.size, self.checkpoints = 1 if checkpoints else pages, checkpoints
        self.empty()

    def __len__(self) -> int:
        """Return the number of places, trimmed ones included."""
        return len(self.pages) // self.size

    def empty(self) -> None:
        self.pages: list[BlockId] = []
        self.trimmed = 0
        self._snapshot: tuple[BlockId, ...] | None = None

    def append(self, pages: Items[BlockId]) -> None:
        """Add a block by its pages, or a trimmed place."""
        self.pages += pages
        self._snapshot = None

    def block(self, place: int) -> BlockId:
        """Return the block at a place: its first page."""
        return self.pages[place * self.size]

    def blocks(self) -> list[BlockId]:
        return self.pages[:: self.size]

    def next_checkpoint(self, place: int) -> int | None:
        """Return the first place from this one on that has a block; None: there is none."""
        return next((at for at in range(place, len(self)) if self.block(at) != TRIMMED), None)

    def trim(self, count: int) -> list[BlockId]:
        """Empty the first `count` places, and return the blocks that they had, TRIMMED ones included."""
        gone = self.blocks()[self.trimmed : count]
        self.pages[self.trimmed * self.size : count * self.size] = [TRIMMED] * (len(gone) * self.size)
        self.trimmed, self._snapshot = count, None
        return gone

    def snapshot(self) -> tuple[BlockId, ...]:
        """Return the pages as a tuple, made anew only after a change."""
        if self._snapshot is None:
            self._snapshot = tuple(self.pages)
        return self._snapshot

    def copy(self) -> GroupTable:
        twin = GroupTable(self.size, self.checkpoints)
        twin.pages, twin.trimmed, twin._snapshot = self.pages.copy(), self.trimmed, self._snapshot
        return twin

    def pop_tail(self, place: int) -> BlockId | None:
        """Take out the block at a place behind all checkpoints, if there is one, and return it."""
        if len(self) <= place or self.block(place) == TRIMMED:
            return None
        self._snapshot = None
        return self.pages.pop()


class Tail:
    """A block for the states behind the last full block of a sequence that decodes: each one overwrites the one before.

    `place` is that of the block behind which planned steps leave them; at first, that of the last known token. They are
    `saved` once that step has completed. The block is sealed when the sequence leaves.
    """

    __slots__ = ("pages", "place", "saved")

    def __init__(self, pages: tuple[BlockId, ...], place: int) -> None:
        self.pages, self.place, self.saved = pages, place, False

    @property
    def block(self) -> BlockId:
        """The block's name: its first page."""
        return self.pages[0]

    def move(self, place: int) -> None:
        """Note that a planned step leaves the states behind another block."""
        self.place, self.saved = place, False
