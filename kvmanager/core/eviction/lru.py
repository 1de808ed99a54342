"""The least recently used block goes first: one list of released blocks.

A released block table is added tail first, so a child always stands before a copy of its parent. So plain LRU evicts
leaves first, without a count of children.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from common.types import BlockId
from kvmanager.core.eviction.interface import NO_MARK, Mark
from kvmanager.core.free_list import FreeList


class LeastRecentlyUsed(FreeList):
    """Cached blocks, the next to be evicted first."""

    __slots__ = ()

    name: ClassVar[str] = "lru"
    reason: ClassVar[str] = "released longest ago, leaves first"

    def add(self, block: BlockId) -> None:
        self.append(block)

    def restore(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.append(block)

    def take(self, block: BlockId) -> None:
        self.remove(block)

    def discard(self, block: BlockId) -> None:
        self.remove(block)

    def replaced(self, old: BlockId, by: BlockId) -> None:
        self.remove(old)

    def pop(self) -> BlockId:
        return self.popleft()

    def registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
        """Change nothing: only the order of release counts."""

    def used(self, block: BlockId) -> None:
        """Change nothing: only the order of release counts."""

    def mark_of(self, block: BlockId) -> Mark:
        return NO_MARK

    def why(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ()

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        before = next(place for place, each in enumerate(self) if each == block)
        return (("released_since", float(len(self) - before - 1)),)
