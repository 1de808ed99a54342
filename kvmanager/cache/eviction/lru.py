"""The least recently used block goes first: one list of released blocks.

A released block table is added tail first, so a child always stands before a copy of its parent. So plain LRU evicts
leaves first, without a count of children.

Withheld blocks, and those before them, are passed over at the head of the list. They are set aside then, in the order
of their release: each of them is older than what the list has left, and goes first when it may go again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.interface import NO_MARK, Mark, no_leaf
from kvmanager.contracts.block import Blocks

_ABSENT = -1


# An order of blocks in which any one leaves in O(1): a doubly linked list threaded through two arrays.
class LinkedBlocks:
    """First in, first out, with removal from the middle. Holds each of `num_blocks` block ids at most once.

    The links of block b are `_next[b]` and `_previous[b]`; index num_blocks is the sentinel that closes the ring.
    """

    __slots__ = ("_length", "_next", "_previous", "_sentinel")

    def __init__(self, num_blocks: int, blocks: Iterable[BlockId] = ()) -> None:
        self._sentinel = num_blocks
        self.empty()
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: BlockId) -> bool:
        return self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield BlockId(block)
            block = self._next[block]

    def empty(self) -> None:
        """Take out every block."""
        count = self._sentinel
        self._next, self._previous = [_ABSENT] * count + [count], [_ABSENT] * count + [count]
        self._length = 0

    def append(self, block: BlockId) -> None:
        """Put a block that is not in the list at its end. Raises ValueError when it is."""
        if self._next[block] != _ABSENT:
            raise ValueError(f"block {block} is in the list already")
        last = self._previous[self._sentinel]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = self._sentinel
        self._previous[self._sentinel] = block
        self._length += 1

    def remove(self, block: BlockId) -> None:
        """Take a block out, wherever it stands. Raises ValueError when it is not in the list."""
        after = self._next[block]
        if after == _ABSENT:
            raise ValueError(f"block {block} is not in the list")
        before = self._previous[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = _ABSENT
        self._length -= 1

    def popleft(self) -> BlockId:
        """Take the first block out. Raises IndexError when the list is empty."""
        if not self._length:
            raise IndexError("the list is empty")
        following, sentinel = self._next, self._sentinel
        block = following[sentinel]
        after = following[block]
        following[sentinel], self._previous[after] = after, sentinel
        following[block] = self._previous[block] = _ABSENT
        self._length -= 1
        return BlockId(block)


class LeastRecentlyUsed(LinkedBlocks):
    """Cached blocks, the next to be evicted first. Its length counts those that are set aside."""

    __slots__ = ("_aside", "_blocks", "_entries", "_number", "_ready", "withheld")

    name: ClassVar[str] = "lru"
    reason: ClassVar[str] = "released longest ago, leaves first"

    def __init__(self, blocks: Blocks, entries: dict[BlockHash, BlockId], linked: bool = True) -> None:
        # Where hashes are not linked, every block is a leaf: the eviction of one makes no other one a leaf.
        self._blocks, self._entries = blocks, entries if linked else {}
        self.withheld: Collection[BlockId] = ()
        super().__init__(len(blocks))

    def empty(self) -> None:
        super().empty()
        # The blocks that were set aside with their numbers, and (number, block) of those that may go; some are stale.
        self._aside: dict[BlockId, int] = {}
        self._ready: list[tuple[int, BlockId]] = []
        self._number = 0

    def __contains__(self, block: BlockId) -> bool:
        return block in self._aside or super().__contains__(block)

    def __iter__(self) -> Iterator[BlockId]:
        yield from self._aside
        yield from super().__iter__()

    def add_block(self, block: BlockId) -> None:
        self.append(block)

    def restore_blocks(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.append(block)

    def reuse_block(self, block: BlockId) -> None:
        if self._aside:
            self.discard_block(block)
        else:
            self.remove(block)

    def discard_block(self, block: BlockId) -> None:
        if self._aside and self._aside.pop(block, None) is not None:
            self._length -= 1
        else:
            self.remove(block)

    def replace_block(self, old: BlockId, by: BlockId) -> None:
        self.discard_block(old)

    # ------------------------------------------------------------ eviction

    def pop_block(self) -> BlockId:
        if not self._aside and not self.withheld:
            return self.popleft()
        if not self.can_pop():
            raise no_leaf() if self._length else IndexError("nothing is cached")
        if self._ready:
            _, block = heapq.heappop(self._ready)
            self.discard_block(block)
        else:
            block = self.popleft()
        self._expose(block)
        return block

    def can_pop(self) -> bool:
        """Return whether there is a leaf that is not withheld; set the blocks aside that stand before it."""
        ready, aside, children = self._ready, self._aside, self._blocks.children
        while ready and (aside.get(ready[0][1]) != ready[0][0] or ready[0][1] in self.withheld):
            heapq.heappop(ready)
        if ready:
            return True
        following, sentinel = self._next, self._sentinel
        while (number := following[sentinel]) != sentinel:
            block = BlockId(number)
            if block not in self.withheld and not children[block]:
                return True
            self.remove(block)
            self._length += 1
            self._number += 1
            aside[block] = self._number
        return False

    def withhold_block(self, block: BlockId) -> None:
        """Change nothing: the block is passed over when its turn comes."""

    def offer_block(self, block: BlockId) -> None:
        if block in self._aside and not self._blocks.children[block]:
            heapq.heappush(self._ready, (self._aside[block], block))

    def pop_withheld(self, block: BlockId) -> None:
        self.discard_block(block)
        self._expose(block)

    def _expose(self, block: BlockId) -> None:
        """Let the block before one that goes go too, if that was its last child and the block was set aside."""
        parent = self._blocks.parent[block]
        above = self._entries.get(parent) if parent else None
        if above is None or self._blocks.children[above] > 1 or above in self.withheld or above not in self._aside:
            return
        heapq.heappush(self._ready, (self._aside[above], above))

    # ------------------------------------------------------------ what happens to blocks

    def note_registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
        """Change nothing: only the order of release counts."""

    def note_used(self, block: BlockId) -> None:
        """Change nothing: only the order of release counts."""

    def forget_content(self, content: BlockHash) -> None:
        """Change nothing: what has gone is not remembered."""

    def mark_of(self, block: BlockId) -> Mark:
        return NO_MARK

    def explain_choice(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ()

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        before = next(place for place, each in enumerate(self) if each == block)
        return (("released_since", float(len(self) - before - 1)),)
