"""Copy-on-write for sequences of one prompt: full blocks are shared, the partial last block is copied, never shared.

A fork computes its last known token itself, for the logits. A copy therefore covers num_tokens - 1 slots. If the copy
held the last token too, nothing would be left to compute, and the fork would wait for ever.
"""

from __future__ import annotations

from common.contracts.types import TRIMMED, BlockId
from kvmanager.contracts.sequence import Sequence


def shared_full_blocks(parent: Sequence, limit: int) -> list[BlockId]:
    """Return up to `limit` leading blocks of the parent's block table. The caller checks that they are full."""
    shared = parent.block_table[:limit]
    return shared[: shared.index(TRIMMED)] if TRIMMED in shared else shared


def copy_length(num_tokens: int, block_size: int) -> int:
    """Return how many leading tokens of the fork the copy covers: 0 when its last block holds only the last token."""
    return num_tokens - 1 if (num_tokens - 1) % block_size else 0


def copy_source(parent: Sequence, index: int) -> BlockId | None:
    """Return the parent's block at the place of the fork's partial block; None when it has none or trimmed it."""
    if index >= len(parent.block_table) or parent.block_table[index] == TRIMMED:
        return None
    return parent.block_table[index]
