"""The blocks of one worker and their four states. Each transition is checked; hashes have no meaning here."""

from __future__ import annotations

from collections import deque

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import hash_in
from common.contracts.types import BlockId
from kvmanager.cache.eviction.interface import EvictionOrder
from kvmanager.cache.retention import Retention
from kvmanager.cache.state_tree import StateTree
from kvmanager.contracts.block import CACHED, FREE, IN_USE, LEASED, PART, Blocks


class FreeBlocks(deque[BlockId]):
    """The free blocks, the one that was freed first at the left. No block leaves from the middle."""


class BlockPool:
    """FREE + LEASED + IN_USE + CACHED = all blocks, after each method. Where the pool has groups, all count pages.

    `cached_others` are the further pages of cached blocks.
    """

    __slots__ = (
        "blocks", "cached", "cached_others", "early", "free", "leased", "left", "marks", "others", "pinned",
        "retention", "states",
    )  # fmt: skip

    def __init__(
        self, blocks: Blocks, cached: EvictionOrder, retention: Retention, states: StateTree | None = None
    ) -> None:
        """Make a pool of blocks that are all free; `cached` is empty, and `retention` follows it."""
        self.states, self.early = states, ""
        self.left: tuple[BlockId, ...] = ()
        self.blocks = blocks
        # Both are empty while nobody uses retention, which then costs nothing else.
        self.retention, self.marks, self.pinned = retention, retention.marks, retention.pinned
        self.free = FreeBlocks(map(BlockId, range(len(blocks))))
        self.cached = cached
        self.leased = self.cached_others = 0
        self.others = blocks.others

    @property
    def available(self) -> int:
        """Blocks that may be granted: free ones and, by eviction, cached ones."""
        return len(self.free) + len(self.cached) + self.cached_others

    @property
    def cached_pages(self) -> int:
        return len(self.cached) + self.cached_others

    @property
    def in_use(self) -> int:
        """Blocks that at least one block table holds."""
        return len(self.blocks) - len(self.free) - self.cached_pages - self.leased

    def check_block(self, block: BlockId) -> None:
        """Raise ProtocolViolation when the pool has no such block."""
        if not 0 <= block < len(self.blocks):
            raise ProtocolViolation(f"block {block} is not one of the {len(self.blocks)} of this pool")

    def take_block(self) -> BlockId:
        """Take the first free block into a block table, with one reference. Raises IndexError when none is free."""
        block = self.free.popleft()
        self.blocks.state[block], self.blocks.refs[block] = IN_USE, 1
        return block

    def take_pages(self, group: int, count: int) -> BlockId:
        """Do what `take_block` does with the first `count` free pages, as one block of a group."""
        block = self.take_block()
        self._join(block, group, tuple([self.free.popleft() for _ in range(count - 1)]))
        return block

    def _join(self, block: BlockId, group: int, others: tuple[BlockId, ...]) -> None:
        """Make one block of a page in use and others."""
        self.blocks.group[block] = group
        for page in others:
            self.blocks.state[page] = PART
        if others:
            self.others[block] = others

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

    def bind_pages(self, block: BlockId, group: int, others: tuple[BlockId, ...]) -> None:
        """Do what `bind_block` does with several leased pages, the first and the others, as one block of a group."""
        self.bind_block(block)
        for page in others:
            if not (0 <= page < len(self.blocks.state) and self.blocks.state[page] is LEASED):
                raise self._not_leased(page, "bound")
            self.blocks.state[page] = PART
            self.leased -= 1
        self._join(block, group, others)

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
            if self.others:
                self.cached_others -= blocks.pages_of(block) - 1
            if self.marks or self.pinned:
                self.retention.note_taken(block)
            blocks.state[block] = IN_USE
        elif blocks.hash[block] is not None:
            self.cached.note_used(block)
        if self.states is not None and blocks.group[block] == self.states.group:
            key = blocks.hash[block]
            if key is not None:
                self.states.note_taken(hash_in(key))
        blocks.refs[block] += 1

    def drop_block(self, block: BlockId) -> bool:
        """Drop a reference; a registered block without any goes to the cache. Return whether it is free now."""
        blocks = self.blocks
        left = blocks.refs[block] - 1
        blocks.refs[block] = left
        if left:
            return False
        key = blocks.hash[block]
        if key is None:
            blocks.state[block] = FREE
            self.free.append(block)
            if self.others:
                self._free_others(block)
            return True
        blocks.state[block] = CACHED
        self.cached.add_block(block)
        if self.others:
            self.cached_others += blocks.pages_of(block) - 1
        if self.marks or self.pinned:
            self.retention.note_cached(block)
        if self.states is not None:
            if blocks.group[block] == self.states.group:
                self.states.note_cached(hash_in(key), block)
            elif not blocks.group[block] and not blocks.children[block]:
                self.states.note_end(block)
        return False

    def uncache_block(self) -> BlockId:
        """Free the cached block that is next in the order of eviction; the caller forgets its hash.

        `early` says why it leaves before all others, where a pool has checkpoints; it is empty if it does not. `left`
        has its further pages.
        """
        early = self.states.first_to_leave(self.retention.keeps) if self.states is not None else None
        if early is not None:
            block, self.early = early
            self.retention.pop_early(block)
        else:
            self.early = ""
            block = self.retention.pop_block() if self.marks or self.pinned else self.cached.pop_block()
        self.blocks.state[block] = FREE
        self.free.append(block)
        self.left = ()
        if self.others:
            self.left = self.others.get(block, ())
            self.cached_others -= self._free_others(block)
        return block

    def free_cached_block(self, block: BlockId) -> None:
        """Free a cached block, wherever it stands in the order of eviction; the caller forgets its hash."""
        self.cached.discard_block(block)
        self._free_cached(block)

    def replace_cached_block(self, old: BlockId, by: BlockId) -> None:
        """Free a cached block whose content a block in use has."""
        self.cached.replace_block(old, by)
        if self.marks or self.pinned:
            self.retention.note_replaced(old)
        self._free_cached(old)

    def free_all_cached(self) -> None:
        """Free every cached block; the caller has forgotten all hashes."""
        for block in list(self.cached):
            self.free_cached_block(block)

    def _free(self, block: BlockId) -> None:
        self.blocks.state[block] = FREE
        self.free.append(block)

    def _free_cached(self, block: BlockId) -> None:
        self._free(block)
        if self.others:
            self.cached_others -= self._free_others(block)

    def _free_others(self, block: BlockId) -> int:
        """Free the further pages of a block, and return how many there were."""
        others = self.others.pop(block, ())
        for page in others:
            self.blocks.state[page] = FREE
            self.free.append(page)
        return len(others)

    def _not_leased(self, block: BlockId, verb: str) -> ProtocolViolation:
        self.check_block(block)
        state = self.blocks.state[block].value
        return ProtocolViolation(f"block {block} was {verb} although it is {state}, not leased")
