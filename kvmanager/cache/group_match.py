"""Hits where the pool has groups: the deepest boundary behind which every group has the blocks that are read.

group 0, full       | x | x | x | x | x |   |      found: 5 blocks
a run, a window     |   | x |   | x | x |   |      of which a token behind block 5 reads the last two: hits 5
another             | x | x |   |   | x |   |      of which it reads the last two, and lacks one: hits 2
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from common.contracts.lease import unread_blocks
from common.contracts.types import BlockHash, BlockId, KvGroupKind, MissReason
from kvmanager.cache.prefix_cache import PrefixCache, PrefixMatch, RunHits
from kvmanager.contracts.block import Blocks, key_of
from kvmanager.contracts.ledger_config import LedgerConfig


class GroupMatch(NamedTuple):
    """The hits of a prompt in the first group, in each run, and what to say of them.

    The first group has `sealed` leading blocks, as many as the hits or more.
    """

    hits: list[BlockId]
    runs: tuple[RunHits, ...]
    match: PrefixMatch
    sealed: int


class GroupMatcher:
    """Looks up one prompt. `limit` bounds its hits: the block of the last token is none."""

    def __init__(
        self,
        cache: PrefixCache,
        blocks: Blocks,
        config: LedgerConfig,
        block_hashes: Items[BlockHash],
        num_tokens: int,
    ) -> None:
        self._cache, self._blocks, self._config, self._hashes = cache, blocks, config, block_hashes
        self._num_tokens = num_tokens
        self._full = min(num_tokens // config.block_size, len(block_hashes))
        self._limit = min(self._full, config.hits_of(num_tokens))

    def match(self) -> GroupMatch:
        """Return the most hits: of sealed blocks alone, or of leading ones that another sequence may still fill.

        A sequence can compute what its filler leaves unfilled only if it has all blocks before that.
        """
        present = self._cache.find_longest_prefix(self._hashes, self._full)
        there = self._sealed_in(present)
        sealed, leading = self._deepest(there), self._leading(present)
        hits = max(sealed, leading)
        unread = [0 if hits > sealed else min(self._unread(run, hits), hits) for run in self._runs]
        runs = tuple(
            RunHits(first, [self._found(index, run) for index in range(first, hits)])
            for run, first in zip(self._runs, unread, strict=True)
        )
        return GroupMatch(present[:hits], runs, self._explained(hits, len(present)), there)

    @property
    def _runs(self) -> range:
        return range(1, len(self._config.groups))

    def _unread(self, run: int, hits: int) -> int:
        size = self._config.block_size
        return unread_blocks(self._config.groups[run], hits * size, size)

    def _find(self, index: int, run: int) -> BlockId | None:
        """Return the block of a run at a place of the prompt, sealed or to be filled."""
        own = self._hashes[index]
        return self._cache.find_block(key_of(own, run), own, index)

    def _found(self, index: int, run: int) -> BlockId:
        block = self._find(index, run)
        assert block is not None, "a hit was found just now"
        return block

    def _is_sealed(self, block: BlockId | None) -> bool:
        return block is not None and self._blocks.hash[block] is not None

    def _sealed_in(self, present: list[BlockId]) -> int:
        """Return how many leading blocks of the first group are sealed, the limit at most."""
        hash_of, most = self._blocks.hash, min(len(present), self._limit)
        return next((index for index in range(most) if hash_of[present[index]] is None), most)

    def _deepest(self, hits: int) -> int:
        """Return the deepest boundary up to `hits` behind which each run has sealed all that is read.

        A place that is missing is read behind each boundary between it and the one that was tried.
        """
        while hits:
            missing = self._missing(hits)
            if missing is None:
                return hits
            hits = missing
        return 0

    def _missing(self, hits: int) -> int | None:
        for run in self._runs:
            for index in range(hits - 1, self._unread(run, hits) - 1, -1):
                if not self._is_sealed(self._find(index, run)):
                    return index
        return None

    def _leading(self, present: list[BlockId]) -> int:
        """Return how many leading places every group has, where no run lacks a block before them.

        All blocks of a place are sealed, or one sequence fills them all: they are filled slot by slot together.
        """
        blocks = self._blocks
        for index, block in enumerate(present[: self._limit]):
            if any(self._unread(run, index + 1) for run in self._runs):
                return index
            place = [block, *(self._find(index, run) for run in self._runs)]
            there = [each for each in place if each is not None]
            sealed = sum(blocks.hash[each] is not None for each in there)
            owners = {blocks.owner[each] for each in there}
            if len(there) < len(place) or sealed not in (0, len(place)) or (not sealed and len(owners) > 1):
                return index
        return min(len(present), self._limit)

    def _explained(self, hits: int, present: int) -> PrefixMatch:
        """Return what to say of so many hits, where the first group has the first `present` full blocks."""
        limited = min(present, self._limit)
        if hits == limited:
            return self._cache.explain_match(self._hashes, self._num_tokens, self._config.block_size, present)
        for run in self._runs:
            for index in range(limited - 1, self._unread(run, limited) - 1, -1):
                ghost = self._cache.ghosts.get(key_of(self._hashes[index], run))
                if self._find(index, run) is None and ghost is not None:
                    return PrefixMatch(hits, MissReason.EVICTED, evicted_for=ghost[0], retention=ghost[1])
        if any(group.kind is KvGroupKind.STATE for group in self._config.groups):
            return PrefixMatch(hits, MissReason.UNRESUMABLE, limited)
        return PrefixMatch(hits, MissReason.WINDOWED)
