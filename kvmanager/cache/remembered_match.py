"""The match of a sequence that waits for blocks, for as long as nothing changes on which it depends.

A long prompt has thousands of blocks. Its match would otherwise be made anew at each report while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.contracts.types import BlockId, SequenceId
from kvmanager.cache.prefix_cache import PrefixMatch


@dataclass(frozen=True, slots=True)
class RememberedMatch:
    """The hits of a sequence that it reads, and how many of them no sequence holds; `unread` ones stand before them.

    The prefix cache watches the hashes of the hits, and the first hash that is no hit; with a window, those of
    `deciding_hashes`. The match holds until a block of one of these hashes is registered, evicted, expected, given up,
    taken into use or released.
    """

    sequence: SequenceId
    num_tokens: int
    hits: list[BlockId]
    match: PrefixMatch
    cached_hits: int
    unread: int = 0
