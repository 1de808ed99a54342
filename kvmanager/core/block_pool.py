"""The blocks of one worker and their four states. Each transition is checked; hashes have no meaning here."""

from __future__ import annotations

from common.errors import ProtocolViolation
from common.types import BlockId
from kvmanager.core.block import Block, BlockState
from kvmanager.core.eviction.interface import EvictionOrder
from kvmanager.core.free_list import FreeList


class BlockPool:
    """FREE + LEASED + IN_USE + CACHED = all blocks, after each method."""

    __slots__ = ("blocks", "cached", "free", "leased")

    def __init__(self, num_blocks: int, cached: EvictionOrder) -> None:
        """Make a pool of free blocks; `cached` is empty."""
        ids = [BlockId(block) for block in range(num_blocks)]
        self.blocks = [Block(block) for block in ids]
        self.free = FreeList(num_blocks, ids)
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

    def get(self, block: BlockId) -> Block:
        """Return a block by its id. Raises ProtocolViolation when the pool has no such block."""
        if not 0 <= block < len(self.blocks):
            raise ProtocolViolation(f"block {block} is not one of the {len(self.blocks)} of this pool")
        return self.blocks[block]

    def take(self) -> Block:
        """Take the first free block into a block table, with one reference. Raises IndexError when none is free."""
        block = self.blocks[self.free.popleft()]
        block.state, block.refs = BlockState.IN_USE, 1
        return block

    def lease(self) -> BlockId:
        """Lease the first free block to the worker. Raises IndexError when none is free."""
        block = self.blocks[self.free.popleft()]
        block.state = BlockState.LEASED
        self.leased += 1
        return block.id

    def bind(self, block_id: BlockId) -> Block:
        """Move a leased block into a block table, with one reference. Raises ProtocolViolation if it is not leased."""
        block = self._leased(block_id, "bound")
        block.state, block.refs = BlockState.IN_USE, 1
        self.leased -= 1
        return block

    def give_back(self, block_id: BlockId) -> None:
        """Free a leased block that the worker returned. Raises ProtocolViolation when it is not leased."""
        block = self._leased(block_id, "returned")
        block.state = BlockState.FREE
        self.leased -= 1
        self.free.append(block.id)

    def hold(self, block: Block) -> None:
        """Add a reference to a block in use or in the cache."""
        if block.state is BlockState.CACHED:
            self.cached.take(block)
            block.state = BlockState.IN_USE
        elif block.hash is not None:
            self.cached.used(block)
        block.refs += 1

    def drop(self, block: Block) -> bool:
        """Drop a reference; a registered block without any goes to the cache. Return whether it is free now."""
        block.refs -= 1
        if block.refs:
            return False
        if block.hash is not None:
            block.state = BlockState.CACHED
            self.cached.add(block)
            return False
        block.state = BlockState.FREE
        self.free.append(block.id)
        return True

    def uncache(self) -> Block:
        """Free the cached block that is next in the order of eviction; the caller forgets its hash."""
        block = self.blocks[self.cached.pop()]
        block.state = BlockState.FREE
        self.free.append(block.id)
        return block

    def free_cached(self, block: Block) -> None:
        """Free a cached block, wherever it stands in the order of eviction; the caller forgets its hash."""
        self.cached.discard(block)
        block.state = BlockState.FREE
        self.free.append(block.id)

    def replace_cached(self, old: Block, by: Block) -> None:
        """Free a cached block whose content a block in use has."""
        self.cached.replaced(old, by)
        old.state = BlockState.FREE
        self.free.append(old.id)

    def free_all_cached(self) -> None:
        """Free every cached block; the caller has forgotten all hashes."""
        for block_id in list(self.cached):
            self.free_cached(self.blocks[block_id])

    def _leased(self, block_id: BlockId, verb: str) -> Block:
        block = self.get(block_id)
        if block.state is not BlockState.LEASED:
            raise ProtocolViolation(f"block {block_id} was {verb} although it is {block.state.value}, not leased")
        return block
