"""The worker's view of its blocks: the lease pool, how far each block is filled, and the content of sealed blocks.

`fill[b]` counts the leading slots of b that all steps planned so far write, in stream order. `content[b]` says which
content a sealed block of a completed step holds. The entry outlives the block table, so that an inventory can offer the
block to the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlock
from common.contracts.types import TRIMMED, BlockHash, BlockId


class Content(NamedTuple):
    """The content of a sealed block: its hash, its parent's (None for a first block), depth and step of last use."""

    hash: BlockHash
    parent: BlockHash | None
    depth: int
    last_used: int


class BlockStates:
    """The pool, and the fill, holders and content of all blocks; block tables belong to the sequences."""

    def __init__(self, num_blocks: int, linked: bool = True) -> None:
        """With `linked`, a claim counts only while its ancestors are claimed."""
        self.linked = linked
        self.pool: deque[BlockId] = deque()
        self.fill = [0] * num_blocks
        self.holders = [0] * num_blocks
        self.held = 0
        self.content: dict[BlockId, Content] = {}

    def lease(self, block: BlockId) -> None:
        """Add a block to the pool and drop its claim: no inventory may offer the content of an unbound block."""
        self.drop_claim(block)
        self.pool.append(block)

    def drop_claim(self, block: BlockId) -> None:
        """Forget which content a block holds."""
        self.content.pop(block, None)

    def bind(self) -> BlockId | None:
        """Empty the head of the pool and move it to a block table; None when the pool is empty."""
        if not self.pool:
            return None
        block = self.pool.popleft()
        self.reset(block)
        self.holders[block] = 1
        self.held += 1
        return block

    def forget_unheld(self) -> None:
        """Forget the content of every block that no block table has: the prefix cache was reset."""
        self.content = {block: content for block, content in self.content.items() if self.holders[block]}

    def reset(self, block: BlockId) -> None:
        """Make a block empty: no slot counts as written, no content is claimed."""
        self.fill[block] = 0
        self.drop_claim(block)

    def reset_fresh(self, blocks: Iterable[BlockId], copied: frozenset[BlockId]) -> None:
        """Empty the blocks that an admission grants anew, except those into which the same batch copied."""
        for block in blocks:
            if block not in copied:
                self.reset(block)

    def copy(self, src: BlockId, dst: BlockId, slots: int) -> None:
        """Account for a copy queued now: dst gets those of its first `slots` that src holds at this point."""
        self.drop_claim(dst)
        self.fill[dst] = min(self.fill[src], slots)

    def fill_up(self, block_table: Sequence[BlockId], start: int, end: int, shift: int) -> None:
        """Count the slots of positions start .. end - 1 as filled: drafts wrote them, and were right.

        Slots behind them keep what refused drafts wrote. They do not count, so the next rows write them again.
        """
        while start < end:
            index = start >> shift
            upto = min(end, (index + 1) << shift)
            self.fill[block_table[index]] += upto - start
            start = upto

    def hold(self, block_table: Iterable[BlockId]) -> None:
        """Count a block table as holder of its blocks."""
        for block in block_table:
            if block == TRIMMED:
                continue
            self.held += not self.holders[block]
            self.holders[block] += 1

    def let_go(self, block_table: Iterable[BlockId], step: int) -> None:
        """Stop counting a block table as holder; `step` is the last use of the contents of its blocks."""
        for block in block_table:
            if block != TRIMMED:
                self.holders[block] -= 1
                self.held -= not self.holders[block]
                content = self.content.get(block)
                if content is not None:
                    self.content[block] = content._replace(last_used=step)

    def cached_blocks(self) -> tuple[CachedBlock, ...]:
        """Return the claims whose ancestors are claimed too, parents first.

        An ancestor may have been granted again while a freed child was not yet overwritten: such a child is left out.
        Where every layer has a window, all claims are returned, and each says where it stands.
        """
        if not self.linked:
            return tuple(
                CachedBlock(block, each.hash, -1, each.last_used, each.parent or each.hash, each.depth)
                for block, each in sorted(self.content.items())
            )
        found: list[CachedBlock] = []
        index: dict[BlockHash, int] = {}
        for block, content in sorted(self.content.items(), key=lambda item: (item[1].depth, item[0])):
            parent = self.parent_index(content, index)
            if parent is not None:
                index.setdefault(content.hash, len(found))
                found.append(CachedBlock(block, content.hash, parent, content.last_used))
        return tuple(found)

    def parent_index(self, content: Content, index: dict[BlockHash, int]) -> int | None:
        """Return where the parent's claim stands, -1 for a first block, None when no block claims the parent."""
        return -1 if content.parent is None else index.get(content.parent)

    def refuse_unknown(self, blocks: Sequence[BlockId]) -> None:
        """Raise ProtocolViolation when the worker has no such block; callers leave TRIMMED places out."""
        if blocks and not 0 <= min(blocks) <= max(blocks) < len(self.fill):
            wrong = next(block for block in blocks if not 0 <= block < len(self.fill))
            raise ProtocolViolation(f"the manager named block {wrong}; this worker has 0 to {len(self.fill) - 1}")

    def refuse_held(self, granted: list[BlockId]) -> None:
        """Raise ProtocolViolation when a grant repeats a block, or names one that a block table or the pool has."""
        if not granted:
            return
        taken = set(self.pool)
        for block in granted:
            if self.holders[block] or block in taken:
                raise ProtocolViolation(f"block {block} was granted anew while the worker still holds it")
            taken.add(block)
