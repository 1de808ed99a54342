"""Hits where every layer has a window: the blocks that the next token reads, whatever stood before them."""

from __future__ import annotations

from collections.abc import Sequence as Items

from common.lease import window_blocks
from common.types import BlockHash, BlockId
from kvmanager.core.config import LedgerConfig
from kvmanager.core.prefix_cache import PrefixCache, PrefixMatch


def match_in_window(
    cache: PrefixCache, config: LedgerConfig, block_hashes: Items[BlockHash], num_tokens: int, full: int
) -> tuple[list[BlockId], PrefixMatch]:
    """Return the deepest run of sealed blocks that a window covers, or more blocks from the first one on.

    The latter may be pending: a sequence that has all blocks before one can compute it. `full` counts the prompt's full
    blocks with a hash.
    """
    limit = min(full, config.hits_of(num_tokens))
    unread, run = cache.deepest_run(block_hashes, limit, config.unread_blocks)
    leading = cache.longest(block_hashes, min(limit, window_blocks(config.window, config.block_size)))
    while config.unread_blocks(len(leading)):
        leading.pop()
    if len(leading) > unread + len(run):
        unread, run = 0, leading
    present = unread + len(run)
    if present == limit < full and cache.has(block_hashes, limit):
        present = full
    return run, cache.explain(block_hashes, num_tokens, config.block_size, present)
