"""The order of eviction: one LRU list of released blocks.

A released block table is appended tail first, so a child always stands before a copy of its parent. Plain LRU therefore
evicts leaves first, without a tree or a search. After a rebuild the order of release is unknown; the order by depth,
deepest first, keeps the rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from common.types import BlockId
from kvmanager.core.free_list import FreeList


class EvictionOrder(FreeList):
    """Cached blocks, the next to be evicted first."""

    __slots__ = ()


class Restored(NamedTuple):
    """A cached block of an inventory: its depth (0 is the first block) and the step that last used it."""

    block: BlockId
    depth: int
    last_used: int


def order_after_rebuild(restored: Iterable[Restored]) -> list[BlockId]:
    """Return the blocks in the order of eviction: deepest first, then the least recently used."""
    return [each.block for each in sorted(restored, key=lambda each: (-each.depth, each.last_used))]
