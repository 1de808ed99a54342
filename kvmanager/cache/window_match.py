"""Hits where every layer has a window: the blocks that the next token reads, whatever stood before them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from common.contracts.lease import window_blocks
from common.contracts.types import BlockHash, BlockId, MissReason
from kvmanager.cache.prefix_cache import PrefixCache, PrefixMatch
from kvmanager.contracts.ledger_config import LedgerConfig


def match_in_window(
    cache: PrefixCache, config: LedgerConfig, block_hashes: Items[BlockHash], num_tokens: int, full: int
) -> tuple[list[BlockId], PrefixMatch]:
    """Return the deepest run of sealed blocks that a window covers, or more blocks from the first one on.

    The latter may be pending: a sequence that has all blocks before one can compute it. `full` counts the prompt's full
    blocks with a hash.
    """
    limit = min(full, config.hits_of(num_tokens))
    unread, run = cache.find_deepest_run(block_hashes, limit, config.unread_blocks)
    leading = cache.find_longest_prefix(block_hashes, min(limit, window_blocks(config.window, config.block_size)))
    while config.unread_blocks(len(leading)):
        leading.pop()
    if len(leading) > unread + len(run):
        unread, run = 0, leading
    present = unread + len(run)
    if present == limit < full and cache.has_block(block_hashes, limit):
        present = full
    return run, cache.explain_match(block_hashes, num_tokens, config.block_size, present)


def settled(
    cache: PrefixCache, config: LedgerConfig, block_hashes: Items[BlockHash], num_tokens: int, match: PrefixMatch
) -> PrefixMatch:
    """Return a match for a record: a block that seems never seen was, if a later one of the prompt is known."""
    if not config.window or match.miss_reason not in {MissReason.NEVER_SEEN, MissReason.DIVERGED_AT}:
        return match
    full = min(num_tokens // config.block_size, len(block_hashes))
    if not cache.was_seen(block_hashes, match.diverged_at, full):
        return match
    return replace(match, miss_reason=MissReason.EVICTED, diverged_at=0)


def deciding_hashes(
    cache: PrefixCache, config: LedgerConfig, block_hashes: Items[BlockHash], num_tokens: int, match: PrefixMatch
) -> set[BlockHash]:
    """Return the hashes on which a match depends: those that it has or lacks, and all of the first window."""
    limit = min(len(block_hashes), config.hits_of(num_tokens))
    missing, hits = list[int](), match.hit_blocks
    cache.find_deepest_run(block_hashes, limit, config.unread_blocks, missing)
    # A window of one token reads no block before it; the last hit is looked up all the same.
    places = {hits, limit, *missing, *range(min(config.unread_blocks(hits), max(hits - 1, 0)), hits)}
    first = block_hashes[: window_blocks(config.window, config.block_size)]
    return {*first, *(block_hashes[place] for place in places if place < len(block_hashes))}
