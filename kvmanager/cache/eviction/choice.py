"""The policies of eviction by their names; the default is in `kvmanager/contracts/ledger_config.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.frequency import Frequency
from kvmanager.cache.eviction.interface import EvictionOrder
from kvmanager.cache.eviction.lru import LeastRecentlyUsed
from kvmanager.cache.eviction.utility import PredictedUtility
from kvmanager.contracts.block import Blocks
from kvmanager.contracts.ledger_config import EvictionName

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
