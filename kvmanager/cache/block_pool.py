"""The blocks of one worker and their four states. Each transition is checked; hashes have no meaning here."""

from __future__ import annotations

from collections import deque

from common.contracts.errors import ProtocolViolation
from common.contracts.types import BlockId
from kvmanager.cache.eviction.interface import EvictionOrder
from kvmanager.cache.retention import Retention
from kvmanager.contracts.block import CACHED, FREE, IN_USE, LEASED, Blocks


class FreeBlocks(deque[BlockId]):
    """The free blocks, the one that was freed first at the left. No block leaves from the middle."""


class BlockPool:
    """FREE + LEASED + IN_USE + CACHED = all blocks, after each method."""

    __slots__ = ("blocks", "cached", "free", "leased", "marks", "pinned", "retention")

    def __init__(self, blocks: Blocks, cached: EvictionOrder, retention: Retention) -> None:
        """Make a pool of blocks that are all free; `cached` is empty, and `retention` follows it."""
        self.blocks = blocks
        # Both are empty while nobody uses retention, which then costs nothing else.
        self.retention, self.marks, self.pinned = retention, retention.marks, retention.pinned
        self.free = FreeBlocks(map(BlockId, range(len(blocks))))
        self.cached = cached
        self.leased = 0

    @property
    def available(self) -> int:
        """Blocks that may be granted: free ones and, by eviction, cached ones."""
        return len(self.free) + len(self.cached)

    @property
    def in_use(self) -> int:
        """Blocks that at least one block table holds."""
        return len(self.blocks) - len(self.free) - len(self.cached) - self.leased

    def check_block(self, block: BlockId) -> None:
        """Raise ProtocolViolation when the pool has no such block."""
        if not 0 <= block < len(self.blocks):
            raise ProtocolViolation(f"block {block} is not one of the {len(self.blocks)} of this pool")

    def take_block(self) -> BlockId:
        """Take the first free block into a block table, with one reference. Raises IndexError when none is free."""
        block = self.free.popleft()
        self.blocks.state[block], self.blocks.refs[block] = IN_USE, 1
        return block

    def lease_block(self) -> BlockId:
        """Lease the first free block to the worker. Raises IndexError when none is free."""
        block = self.free.popleft()
        self.blocks.state[block] = LEASED
        self.leased += 1
        return block

    def bind_block(self, block: BlockId) -> None:
        """Move a leased block into a block table, with one reference. Raises ProtocolViolation if it is not leased."""
        state = self.blocks.state
        if not (0 <= block < len(state) and state[block] is LEASED):
            raise self._not_leased(block, "bound")
        state[block], self.blocks.refs[block] = IN_USE, 1
        self.leased -= 1

    def return_block(self, block: BlockId) -> None:
        """Free a leased block that the worker returned. Raises ProtocolViolation when it is not leased."""
        state = self.blocks.state
        if not (0 <= block < len(state) and state[block] is LEASED):
            raise self._not_leased(block, "returned")
        self.leased -= 1
        self._free(block)

    def hold_block(self, block: BlockId) -> None:
        """Add a reference to a block in use or in the cache."""
        blocks = self.blocks
        if blocks.state[block] is CACHED:
            self.cached.reuse_block(block)
            if self.marks or self.pinned:
                self.retention.note_taken(block)
            blocks.state[block] = IN_USE
        elif blocks.hash[block] is not None:
            self.cached.note_used(block)
        blocks.refs[block] += 1

    def drop_block(self, block: BlockId) -> bool:
        """Drop a reference; a registered block without any goes to the cache. Return whether it is free now."""
        blocks = self.blocks
        left = blocks.refs[block] - 1
        blocks.refs[block] = left
        if left:
            return False
        if blocks.hash[block] is None:
            blocks.state[block] = FREE
            self.free.append(block)
            return True
        blocks.state[block] = CACHED
        self.cached.add_block(block)
        if self.marks or self.pinned:
            self.retention.note_cached(block)
        return False

    def uncache_block(self) -> BlockId:
        """Free the cached block that is next in the order of eviction; the caller forgets its hash."""
        block = self.retention.pop_block() if self.marks or self.pinned else self.cached.pop_block()
        self.blocks.state[block] = FREE
        self.free.append(block)
        return block

    def free_cached_block(self, block: BlockId) -> None:
        """Free a cached block, wherever it stands in the order of eviction; the caller forgets its hash."""
        self.cached.discard_block(block)
        self._free(block)

    def replace_cached_block(self, old: BlockId, by: BlockId) -> None:
        """Free a cached block whose content a block in use has."""
        self.cached.replace_block(old, by)
        if self.marks or self.pinned:
            self.retention.note_replaced(old)
        self._free(old)

    def free_all_cached(self) -> None:
        """Free every cached block; the caller has forgotten all hashes."""
        for block in list(self.cached):
            self.free_cached_block(block)

    def _free(self, block: BlockId) -> None:
        self.blocks.state[block] = FREE
        self.free.append(block)

    def _not_leased(self, block: BlockId, verb: str) -> ProtocolViolation:
        self.check_block(block)
        state = self.blocks.state[block].value
        return ProtocolViolation(f"block {block} was {verb} although it is {state}, not leased")
