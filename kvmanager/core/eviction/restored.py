"""The order of eviction after a rebuild, when the order of release is unknown: deepest first keeps children first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from common.types import BlockId


class Restored(NamedTuple):
    """A cached block of an inventory: its depth (0 is the first block) and the step that last used it."""

    block: BlockId
    depth: int
    last_used: int


def order_after_rebuild(restored: Iterable[Restored]) -> list[BlockId]:
    """Return the blocks in the order of eviction: deepest first, then the least recently used."""
    return [each.block for each in sorted(restored, key=lambda each: (-each.depth, each.last_used))]
