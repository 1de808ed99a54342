"""The configuration of one worker's ledger: the size of the pool and the runway policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Runway = Literal["auto", "max"]


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """One worker's pool. `block_size` and `window` are in slots; `runway_slots` and `runway_reach` in slots a sequence.

    `window` is above 0 when every layer is windowed: nothing is cached then. `runway` "auto" keeps a pool of leased
    blocks ahead of need: for `runway_slots` also by evicting, up to `runway_reach` from free blocks alone. "max" gives
    each sequence all blocks of its max_len at admission. `watermark` is the part of the pool that an admission leaves
    free for the growth of those that run; `ghosts` bounds the memory of evicted hashes (0: four for each block).
    """

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    window: int = 0
    max_num_seqs: int = 256
    runway: Runway = "auto"
    runway_slots: int = 32
    runway_reach: int = 128
    watermark: float = 0.01
    ghosts: int = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def hits_of(self, num_tokens: int) -> int:
        """Return how many leading full blocks of a sequence may be shared: not the one that holds its last token."""
        return (num_tokens - 1) // self.block_size

    @property
    def caches(self) -> bool:
        """Whether sealed blocks are kept and published."""
        return self.prefix_caching and not self.window

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission beside running sequences leaves free."""
        return int(self.watermark * self.num_blocks)
