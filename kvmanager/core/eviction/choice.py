"""The policies of eviction by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.types import BlockHash, BlockId
from kvmanager.core.block import Blocks
from kvmanager.core.config import EvictionName
from kvmanager.core.eviction.frequency import Frequency
from kvmanager.core.eviction.interface import EvictionOrder
from kvmanager.core.eviction.lru import LeastRecentlyUsed
from kvmanager.core.eviction.utility import PredictedUtility

_MAKERS: Final[dict[EvictionName, Callable[[Blocks, dict[BlockHash, BlockId], bool], EvictionOrder]]] = {
    "lru": LeastRecentlyUsed,
    "frequency": Frequency,
    "utility": PredictedUtility,
}


def order_of(
    name: EvictionName, blocks: Blocks, entries: dict[BlockHash, BlockId], linked: bool = True
) -> EvictionOrder:
    """Return the policy of that name for these blocks; `entries` has the first copy of each registered hash.

    `linked` says whether a hash leaves only after its children; otherwise no block has any.
    """
    return _MAKERS[name](blocks, entries, linked)
