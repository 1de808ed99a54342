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
from common.contracts.hashing import key_of
from common.contracts.lease import CachedBlock
from common.contracts.types import TRIMMED, BlockHash, BlockId


class Content(NamedTuple):
    """The content of a sealed block: its hash, its parent's (None for a first block), depth and step of last use.

    It is that of the layers of a group.
    """

    hash: BlockHash
    parent: BlockHash | None
    depth: int
    last_used: int
    group: int = 0

    @property
    def key(self) -> BlockHash:
        """What names it among the contents of all groups."""
        return key_of(self.hash, self.group) if self.group else self.hash


# Where the pool has groups, a block is made of pages when it is bound or granted, and is no more once one of them
# begins a new life: every page voids what was claimed of its block.
class PageBlocks:
    """The blocks that the pages of a pool make up, each named by its first page. `sizes` are the pages of a block."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.pages: dict[BlockId, tuple[BlockId, ...]] = {}
        self.group: dict[BlockId, int] = {}
        self._block_of: dict[BlockId, BlockId] = {}

    def make_block(self, group: int, pages: tuple[BlockId, ...]) -> None:
        """Make a block of pages that are no part of another one."""
        self.pages[pages[0]], self.group[pages[0]] = pages, group
        for page in pages:
            self._block_of[page] = pages[0]

    def block_of(self, page: BlockId) -> BlockId | None:
        return self._block_of.get(page)

    def break_block(self, page: BlockId) -> BlockId | None:
        """Forget the block that a page is a part of, and return its name."""
        block = self._block_of.get(page)
        if block is not None:
            del self.group[block]
            for each in self.pages.pop(block):
                del self._block_of[each]
        return block

    def copy(self) -> PageBlocks:
        twin = PageBlocks(self.sizes)
        twin.pages, twin.group, twin._block_of = self.pages.copy(), self.group.copy(), self._block_of.copy()
        return twin


class BlockStates:
    """The pool, and the fill, holders and content of all blocks; block tables belong to the sequences.

    Where the pool has groups, it has pages, `made` knows the blocks, and `held` counts pages.
    """

    def __init__(
        self, num_blocks: int, linked: bool = True, block_pages: tuple[int, ...] = (), block_size: int = 0
    ) -> None:
        """With `linked`, a claim counts only while its ancestors are claimed. `block_size` is in slots."""
        self.linked, self.block_size = linked, block_size
        self.made = PageBlocks(block_pages) if block_pages else None
        self.pool: deque[BlockId] = deque()
        self.fill = [0] * num_blocks
        self.holders = [0] * num_blocks
        self.held = 0
        self.content: dict[BlockId, Content] = {}

    def lease(self, block: BlockId) -> None:
        """Add a block to the pool and drop its claim: no inventory may offer the content of an unbound block."""
        self.drop_claim(block)
        if self.made is not None:
            self._void(block)
        self.pool.append(block)

    def _void(self, page: BlockId) -> None:
        """Forget the block that a page was a part of, and what that block holds."""
        assert self.made is not None
        block = self.made.break_block(page)
        if block is not None:
            self.drop_claim(block)

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

    def make_block(self, group: int, pages: tuple[BlockId, ...]) -> None:
        """Make an empty block of pages that nothing holds."""
        assert self.made is not None
        for page in pages:
            self._void(page)
        self.made.make_block(group, pages)
        self.reset(pages[0])

    def bind_pages(self, group: int) -> tuple[BlockId, ...]:
        """Move the first pages of the pool to a block table, as one block of a group. The pool has enough."""
        assert self.made is not None
        pages = tuple([self.pool.popleft() for _ in range(self.made.sizes[group])])
        self.make_block(group, pages)
        self.holders[pages[0]] = 1
        self.held += len(pages)
        return pages

    def _pages_of(self, block: BlockId) -> int:
        assert self.made is not None
        return len(self.made.pages[block])

    def forget_unheld(self) -> None:
        """Forget the content of every block that no block table has: the prefix cache was reset."""
        for block in [block for block in self.content if not self.holders[block]]:
            del self.content[block]

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

    def fill_with(self, block: BlockId, content: Content | None) -> None:
        """Account for a block that a frame of the host tier is copied into: it is full. None: it claims nothing."""
        self.drop_claim(block)
        self.fill[block] = self.block_size
        if content is not None:
            self.content[block] = content

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
            if not self.holders[block]:
                self.held += 1 if self.made is None else self._pages_of(block)
            self.holders[block] += 1

    def let_go(self, block_table: Iterable[BlockId], step: int) -> None:
        """Stop counting a block table as holder; `step` is the last use of the contents of its blocks."""
        for block in block_table:
            if block != TRIMMED:
                self.holders[block] -= 1
                if not self.holders[block]:
                    self.held -= 1 if self.made is None else self._pages_of(block)
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
        for block, content in sorted(self.content.items(), key=lambda item: (item[1].group, item[1].depth, item[0])):
            parent = self.parent_index(content, index)
            if parent is not None:
                if not content.group:
                    index.setdefault(content.hash, len(found))
                found.append(CachedBlock(block, content.hash, parent, content.last_used))
        return tuple(found)

    def parent_index(self, content: Content, index: dict[BlockHash, int]) -> int | None:
        """Return where the parent's claim stands, -1 for a first block, None when no block claims the parent.

        The parent of a claim behind the first group is the first group's of the same content.
        """
        if content.group:
            return index.get(content.hash)
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
        taken, holders, made = set(self.pool), self.holders, self.made
        for block in granted:
            if block in taken or (holders[block] if made is None else self._is_held(made.block_of(block))):
                raise ProtocolViolation(f"block {block} was granted anew while the worker still holds it")
            taken.add(block)

    def _is_held(self, block: BlockId | None) -> bool:
        return block is not None and self.holders[block] > 0
