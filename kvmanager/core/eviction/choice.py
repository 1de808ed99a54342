"""The policies of eviction by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.types import BlockHash
from kvmanager.core.config import EvictionName
from kvmanager.core.eviction.frequency import Frequency
from kvmanager.core.eviction.interface import EvictionOrder
from kvmanager.core.eviction.lru import LeastRecentlyUsed
from kvmanager.core.eviction.utility import PredictedUtility
from kvmanager.core.prefix_cache import Entry

_MAKERS: Final[dict[EvictionName, Callable[[int, dict[BlockHash, Entry]], EvictionOrder]]] = {
    "lru": lambda num_blocks, _: LeastRecentlyUsed(num_blocks),
    "frequency": Frequency,
    "utility": PredictedUtility,
}


def order_of(name: EvictionName, num_blocks: int, entries: dict[BlockHash, Entry]) -> EvictionOrder:
    """Return the policy of that name for a pool of so many blocks; `entries` are the registered hashes."""
    return _MAKERS[name](num_blocks, entries)
