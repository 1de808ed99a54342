"""Hits where the pool has groups: the deepest boundary behind which every group has the blocks that are read.

group 0, full       | x | x | x | x | x |   |      found: 5 blocks
a run, a window     |   | x |   | x | x |   |      of which a token behind block 5 reads the last two: hits 5
another             | x | x |   |   | x |   |      of which it reads the last two, and lacks one: hits 2

What a frame of host memory holds counts as a sealed block does: the grant loads it. What the disk has, or another
worker, counts so once it has come to a frame: `find_boundary` says how deep a prompt would go on then.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from common.contracts.hashing import group_in, key_of
from common.contracts.lease import unread_blocks
from common.contracts.types import TRIMMED, BlockHash, BlockId, FrameId, KvGroupKind, MissReason
from kvmanager.cache.prefix_cache import PrefixCache, PrefixMatch, RunHits
from kvmanager.contracts.block import ROOT, Blocks
from kvmanager.contracts.ledger_config import LedgerConfig


class GroupMatch(NamedTuple):
    """The hits of a prompt in the first group, in each run, and what to say of them.

    The first group has `sealed` leading blocks, as many as the hits or more. Behind its hits, `frames` of host memory
    hold the next blocks.
    """

    hits: list[BlockId]
    runs: tuple[RunHits, ...]
    match: PrefixMatch
    sealed: int
    frames: tuple[FrameId, ...] = ()


class Lack(NamedTuple):
    """A content of a prompt that is neither in the pool nor in host memory, with what `FrameTier.find` takes."""

    key: BlockHash
    parent: BlockHash
    depth: int


HasContent = Callable[[BlockHash, BlockHash, int], bool]
"""Whether something has a content, by its key, its parent and its depth."""
_TRIES: Final = 16
"""Boundaries that are tried for one whose contents are few enough."""


class GroupMatcher:
    """Looks up one prompt. `limit` bounds its hits: the block of the last token is none.

    Unless it `loads`, what frames hold is no hit.
    """

    def __init__(
        self,
        cache: PrefixCache,
        blocks: Blocks,
        config: LedgerConfig,
        block_hashes: Items[BlockHash],
        num_tokens: int,
        loads: bool = True,
    ) -> None:
        self._cache, self._blocks, self._config, self._hashes = cache, blocks, config, block_hashes
        self._tier = cache.tier if loads else None
        self._num_tokens = num_tokens
        self._full = min(num_tokens // config.block_size, len(block_hashes))
        self._limit = min(self._full, config.hits_of(num_tokens))

    def match(self) -> GroupMatch:
        """Return the most hits: of sealed blocks alone, or of leading ones that another sequence may still fill.

        A sequence can compute what its filler leaves unfilled only if it has all blocks before that.
        """
        present = self._cache.find_longest_prefix(self._hashes, self._full)
        there, below = self._sealed_in(present), list[FrameId]()
        if self._tier is not None and there == min(len(present), self._limit):
            below = self._tier.find_run(self._hashes, len(present), self._full, self._cache.ambiguous)
            there = min(there + len(below), self._limit)
        sealed, leading = self._deepest(there), self._leading(present)
        hits, known = max(sealed, leading), len(present) + len(below)
        if hits > sealed:
            runs = tuple([RunHits(0, [self._found(index, run) for index in range(hits)]) for run in self._runs])
        else:
            runs = tuple([self._hits_of(run, hits) for run in self._runs])
        frames = tuple(below[: max(0, hits - len(present))])
        return GroupMatch(present[:hits], runs, self._explained(hits, known), there, frames)

    def _hits_of(self, run: int, hits: int) -> RunHits:
        """Return what is read of a run behind so many hits, all of it sealed or in frames."""
        first, blocks, frames = min(self._unread(run, hits), hits), list[BlockId](), list[tuple[int, FrameId]]()
        for index in range(first, hits):
            block = self._find(index, run)
            if block is None or not self._is_sealed(block):
                frame, block = self._below(index, run), TRIMMED
                assert frame is not None, "a hit was found just now"
                frames.append((index, frame))
            blocks.append(block)
        return RunHits(first, blocks, tuple(frames))

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

    def _below(self, index: int, run: int) -> FrameId | None:
        """Return the frame of a run's block at a place of the prompt."""
        tier, own = self._tier, self._hashes[index]
        key = key_of(own, run)
        if tier is None or (self._cache.ambiguous and key in self._cache.ambiguous):
            return None
        return tier.find(key, own, index)

    def _is_there(self, index: int, run: int) -> bool:
        """Return whether a run's block at a place of the prompt is sealed, or in a frame."""
        return self._is_sealed(self._find(index, run)) or self._below(index, run) is not None

    def _is_sealed(self, block: BlockId | None) -> bool:
        return block is not None and self._blocks.hash[block] is not None

    def _sealed_in(self, present: list[BlockId]) -> int:
        """Return how many leading blocks of the first group are sealed, the limit at most."""
        hash_of, most = self._blocks.hash, min(len(present), self._limit)
        return next((index for index in range(most) if hash_of[present[index]] is None), most)

    def _deepest(self, hits: int, elsewhere: HasContent | None = None) -> int:
        """Return the deepest boundary up to `hits` behind which each run has all that is read, here or `elsewhere`.

        A place that is missing is read behind each boundary between it and the one that was tried.
        """
        while hits:
            missing = self._missing(hits, elsewhere)
            if missing is None:
                return hits
            hits = missing
        return 0

    def _missing(self, hits: int, elsewhere: HasContent | None) -> int | None:
        for run in self._runs:
            for index in range(hits - 1, self._unread(run, hits) - 1, -1):
                if not self._is_there(index, run) and not (elsewhere and elsewhere(*self._named(index, run))):
                    return index
        return None

    # ------------------------------------------------------------ what could come

    def find_boundary(self, elsewhere: HasContent, hits: int, most: int, most_pages: int) -> int:
        """Return the deepest boundary behind `hits` that a prompt could go on from with what is `elsewhere`, or `hits`.

        At most so many contents, of so many pages, are to come for it. Nothing comes while somebody is about to fill a
        block of the prompt.
        """
        known, sizes = self._known(), self._config.block_pages
        reach, end = known, min(self._limit, known + most)  # of the first group alone more would have to come
        while 0 <= reach < end and elsewhere(*self._named(reach, 0)):
            reach += 1
        for _ in range(_TRIES):
            boundary = self._deepest(max(reach, 0), elsewhere)
            if boundary <= hits:
                break
            lacks = self.lacking(boundary)
            over = len(lacks) - most, sum(sizes[group_in(each.key)] for each in lacks) - most_pages
            if max(over) <= 0:
                return boundary
            # A place less saves one content of each group at most.
            reach = boundary - max(1, over[0] // len(sizes), over[1] // sum(sizes))
        return hits

    def lacking(self, boundary: int) -> list[Lack]:
        """Return what is read behind a boundary and is not here, by depth, of each depth the first group first."""
        found = [(place, 0) for place in range(max(self._known(), 0), boundary)]
        for run in self._runs:
            places = range(min(self._unread(run, boundary), boundary), boundary)
            found += [(place, run) for place in places if not self._is_there(place, run)]
        return [self._named(*each) for each in sorted(found)]

    def absent_keys(self) -> frozenset[BlockHash]:
        """Return the keys of all contents of the prompt that are in no block: few workers have any of them."""
        groups, entries = range(len(self._config.groups)), self._cache.entries
        keys = (key_of(each, group) for each in self._hashes[: self._limit] for group in groups)
        return frozenset([key for key in keys if key not in entries])

    def frames_behind(self, boundary: int) -> list[FrameId]:
        """Return the frames of what is read behind a boundary and is in no block; of the first group the last one."""
        found, tier = list[FrameId](), self._tier
        for run in self._runs:
            for place in range(min(self._unread(run, boundary), boundary), boundary):
                if not self._is_sealed(self._find(place, run)) and (frame := self._below(place, run)) is not None:
                    found.append(frame)
        known = min(self._known(), boundary)
        if tier is not None and known > 0 and self._cache.find_block(*self._named(known - 1, 0)) is None:
            found.append(tier.entries[self._hashes[known - 1]])
        return found

    def _known(self) -> int:
        """Return how many leading blocks of the first group are sealed or in frames; -1: one is still to be filled."""
        present = self._cache.find_longest_prefix(self._hashes, self._limit)
        if self._sealed_in(present) < len(present):
            return -1
        if self._tier is None or len(present) == self._limit:
            return len(present)
        below = self._tier.find_run(self._hashes, len(present), self._limit, self._cache.ambiguous)
        return len(present) + len(below)

    def _named(self, place: int, group: int) -> Lack:
        own = self._hashes[place]
        parent = own if group else self._hashes[place - 1] if place else ROOT
        return Lack(key_of(own, group), parent, place)

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
        """Return what to say of so many hits, where the first group has the first `present` full blocks somewhere."""
        limited = min(present, self._limit)
        if hits == limited:
            return self._cache.explain_match(self._hashes, self._num_tokens, self._config.block_size, present)
        for run in self._runs:
            for index in range(limited - 1, self._unread(run, limited) - 1, -1):
                ghost = self._cache.ghosts.get(key_of(self._hashes[index], run))
                if self._is_there(index, run):
                    continue
                if self._cache.is_below(key_of(self._hashes[index], run)):
                    return PrefixMatch(hits, MissReason.UNFETCHED, limited)
                if ghost is not None and self._find(index, run) is None:
                    return PrefixMatch(hits, MissReason.EVICTED, evicted_for=ghost[0], retention=ghost[1])
        if any(group.kind is KvGroupKind.STATE for group in self._config.groups):
            return PrefixMatch(hits, MissReason.UNRESUMABLE, limited)
        return PrefixMatch(hits, MissReason.WINDOWED)
