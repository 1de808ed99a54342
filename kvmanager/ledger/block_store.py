"""The pool of one worker and the prefix cache over it: the state of each block, and what it holds.

A block that no sequence holds and whose content is known stays cached until it is evicted:

    free  --take_block-->  in use  --release_blocks-->  cached (it has a hash)  --uncache_block-->  free
                                                        free   (it has none)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from common.contracts.clock import Clock
from common.contracts.hashing import hash_in, key_of
from common.contracts.types import TRIMMED, BlockHash, BlockId
from kvmanager.cache.block_pool import BlockPool
from kvmanager.cache.eviction.choice import order_of
from kvmanager.cache.eviction.interface import NO_MARK
from kvmanager.cache.frame_tier import FrameTier
from kvmanager.cache.prefix_cache import PrefixCache, RememberedMatch
from kvmanager.cache.retention import Retention
from kvmanager.cache.state_tree import StateTree
from kvmanager.cache.window_match import deciding_hashes
from kvmanager.contracts.block import CACHED, ROOT, Blocks
from kvmanager.contracts.index_events import Stored
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Run, Sequence


class BlockStore:
    """Columns of all blocks, the pool, the prefix cache, the order of eviction, and what is retained.

    `remembered` is the match of the sequence that was tried last and lacked blocks; `loads` is whether what host memory
    has is a hit.
    """

    __slots__ = (
        "blocks", "cache", "config", "disk", "eviction", "loads", "pool", "remembered", "retention", "states", "tier",
    )  # fmt: skip

    def __init__(self, config: LedgerConfig, clock: Clock) -> None:
        self.config = config
        self.blocks = Blocks(config.num_blocks)
        linked = not config.window
        # The checkpoints of states, where the last group has some.
        self.states = StateTree(len(config.groups) - 1, self.blocks) if config.keeps_states else None
        ghosts, runs = config.ghosts or 4 * config.num_blocks, len(config.groups[1:])
        # Unless every layer has a window, host memory may keep what is evicted.
        self.tier = FrameTier(config.frames, config.eviction, config.block_pages) if config.frames else None
        self.disk = FrameTier(config.saved_frames, config.eviction, config.block_pages) if config.saved_frames else None
        self.cache = PrefixCache(self.blocks, ghosts, linked, runs, self.states, self.tier, self.disk)
        self.eviction = order_of(config.eviction, self.blocks, self.cache.entries, linked)
        self.retention = Retention(
            self.blocks, self.cache.entries, self.eviction, clock, config.retention_limits, config.block_pages
        )
        self.empty()

    def empty(self) -> None:
        """Free every block and forget what it held; event numbers and ghosts go on."""
        self.eviction.empty()
        self.retention.clear()
        self.blocks.clear()
        self.pool = BlockPool(self.blocks, self.eviction, self.retention, self.states)
        self.cache.rebase()
        self.remembered: RememberedMatch | None = None
        self.loads = True

    def is_checkpoint(self, block: BlockId) -> bool:
        """Return whether a block has states, and no K/V."""
        return self.states is not None and self.blocks.group[block] == self.states.group

    def note_end_before(self, block: BlockId) -> None:
        """Let the block before one that was evicted go next, if it is the end of a chain without a checkpoint now."""
        parent = self.blocks.parent[block]
        above = self.cache.entries.get(parent) if self.states is not None and parent else None
        if self.states is not None and above is not None and not self.blocks.children[above]:
            self.states.note_end(above, next_to_leave=True)

    # ------------------------------------------------------------ block tables

    def append_block(self, block: BlockId, sequence: Sequence) -> None:
        """Append a block without content to a block table. Others may share it at once if its hash is known.

        The block of the last known token is not shared. If a sharer filled that slot first, the sequence could never
        compute its logits, because a slot is written once. So it is with all blocks of one that computes all tokens.
        """
        blocks, table, block_hashes = self.blocks, sequence.block_table, sequence.block_hashes
        index, known = len(table), len(block_hashes)
        # What `describe_block` does.
        blocks.index[block], blocks.owner[block] = index, sequence.id
        blocks.parent[block] = ROOT if not index else block_hashes[index - 1] if index <= known else None
        table.append(block)
        if index < known:
            self.expect_content(block, sequence, index)

    def append_fresh_blocks(self, count: int, sequence: Sequence) -> None:
        """Do what `append_block` does with the next free blocks. Raises IndexError when there are too few."""
        blocks, table = self.blocks, sequence.block_table
        take = partial(self.pool.take_pages, 0, sequence.block_pages) if self.config.groups else self.pool.take_block
        index_of, owner_of, parent_of = blocks.index, blocks.owner, blocks.parent
        block_hashes, number = sequence.block_hashes, sequence.id
        first, known = len(table), len(block_hashes)
        shared = min(known, self.config.hits_of(sequence.num_tokens)) if self._shares_early(sequence) else 0
        for index in range(first, first + count):
            block = take()
            index_of[block], owner_of[block] = index, number
            parent_of[block] = ROOT if not index else block_hashes[index - 1] if index <= known else None
            table.append(block)
            if index < shared:
                self.cache.expect_block(block, block_hashes[index])

    def append_run_block(self, block: BlockId, sequence: Sequence, run: Run) -> None:
        """Do what `append_block` does in the table of a run."""
        blocks, block_hashes, index = self.blocks, sequence.block_hashes, len(run.table)
        blocks.index[block], blocks.owner[block] = index, sequence.id
        blocks.parent[block] = block_hashes[index] if index < len(block_hashes) else None
        run.table.append(block)
        if index < len(block_hashes) and not run.checkpoints:
            self.expect_content(block, sequence, index, run.group)

    def append_checkpoint(self, place: int, sequence: Sequence, run: Run) -> None:
        """Give a run of checkpoints a block of the next free pages at a place behind its last one."""
        run.table += [TRIMMED] * (place - len(run.table))
        self.append_run_block(self.pool.take_pages(run.group, run.pages), sequence, run)

    def append_fresh_run(self, count: int, sequence: Sequence, run: Run) -> None:
        """Do what `append_run_block` does with blocks of the next free pages."""
        for _ in range(count):
            self.append_run_block(self.pool.take_pages(run.group, run.pages), sequence, run)

    def expect_content(self, block: BlockId, sequence: Sequence, index: int, group: int = 0) -> None:
        """Let others share a block that the sequence is about to fill, where its hash is known."""
        if index >= len(sequence.block_hashes) or not self._shares_early(sequence):
            return
        if index < self.config.hits_of(sequence.num_tokens):
            self.cache.expect_block(block, key_of(sequence.block_hashes[index], group))

    def _shares_early(self, sequence: Sequence) -> bool:
        """Return whether others may share blocks that the sequence has not filled yet."""
        return self.config.prefix_caching and not sequence.computes_all

    def describe_block(self, block: BlockId, sequence: Sequence, index: int) -> None:
        """Set the index, owner and parent hash of a block, as far as the sequence's block hashes are known."""
        blocks, block_hashes = self.blocks, sequence.block_hashes
        blocks.index[block], blocks.owner[block] = index, sequence.id
        if blocks.group[block]:
            blocks.parent[block] = block_hashes[index] if index < len(block_hashes) else None
            return
        blocks.parent[block] = ROOT if not index else block_hashes[index - 1] if index <= len(block_hashes) else None

    def release_blocks(self, released: Iterable[BlockId]) -> None:
        """Drop a reference to each block. Of several with one content, the one that is released last stays cached.

        The others are in use then and come later in the order of eviction, so a parent still outlives its children.
        """
        blocks, cache, pool, copies = self.blocks, self.cache, self.pool, self.cache.copies
        refs, hash_of, pending = blocks.refs, blocks.hash, blocks.pending
        for block in released:
            block_hash = hash_of[block]
            if block_hash is not None and refs[block] == 1:
                if cache.watched:
                    cache.touch_hash(block_hash)
                if block_hash in copies:
                    cache.forget_block(block)
            if pool.drop_block(block):
                if pending[block] is not None:
                    cache.forget_pending(block)
                blocks.awaited.pop(block, None)

    # ------------------------------------------------------------ content

    def publish_new_block(
        self, block: BlockId, block_hash: BlockHash, parent: BlockHash, before: BlockId | None = None
    ) -> None:
        """Do what `publish_block` does with a hash that no block has: nearly each seal is one.

        A checkpoint goes on from the one of the block `before`.
        """
        cache, blocks, above = self.cache, self.blocks, None
        if blocks.pending[block] is not None:
            cache.forget_pending(block)
        if cache.watched:
            cache.touch_hash(block_hash)
        blocks.hash[block], blocks.parent[block] = block_hash, parent
        if parent and not self.config.window:
            above = cache.entries[parent]
            blocks.children[above] += 1
        elif parent:
            above = cache.entries.get(parent)
        cache.entries[block_hash] = block
        if self.config.groups:
            cache.note_stored(block_hash, blocks.index[block])
            if blocks.group[block]:
                above = before  # a run's block does not continue the chain of the first group's
        elif block_hash not in cache.below and block_hash not in cache.saved:
            cache.number += 1
            cache.events.append(Stored(cache.number, block_hash, blocks.index[block]))
        ghost = cache.ghosts.pop(block_hash, None)
        self.eviction.note_registered(block, above, ghost[2:] if ghost else NO_MARK)

    def publish_block(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Register a block in use. A cached copy of its content is free from now on."""
        cache, pool, entries = self.cache, self.pool, self.cache.entries
        ghost = cache.register_block(block, block_hash, parent)
        above = None if self.blocks.group[block] else entries.get(parent)
        pool.cached.note_registered(block, above, ghost[2:] if ghost else NO_MARK)
        first = entries[block_hash]
        if first != block and self.blocks.state[first] is CACHED:
            cache.forget_block(first)
            pool.replace_cached_block(first, block)
            if self.states is not None and self.is_checkpoint(block):
                self.states.note_held(hash_in(block_hash))

    # ------------------------------------------------------------ remembered matches

    def recall_match(self, sequence: Sequence) -> RememberedMatch | None:
        """Return the match of a sequence from an earlier attempt to admit it, if that still holds."""
        found = self.remembered
        if found is None or found.sequence != sequence.id or found.num_tokens != sequence.num_tokens:
            return None
        return found if self.cache.watched else None

    def remember_match(self, sequence: Sequence, found: RememberedMatch) -> None:
        """Keep the match of a sequence that cannot be admitted now; where the pool has groups, none is kept."""
        if self.config.groups:
            return
        self.remembered = found
        hashes, looked_at = sequence.block_hashes, set[BlockHash]()
        if self.config.window:
            looked_at = deciding_hashes(self.cache, self.config, hashes, sequence.num_tokens, found.match)
        else:
            looked_at.update(hashes[: len(found.hits) + len(found.frames) + 1])
        self.cache.watched = frozenset(looked_at)
