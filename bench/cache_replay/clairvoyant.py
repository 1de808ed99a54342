"""The limit: the leaf goes whose next use is the farthest. It knows all requests; no policy can do better.

With blocks of one size, each of which must be computed when it is missing, Belady's rule is optimal. A parent is used
whenever its child is. So its next use is never later, and the rule among leaves is the rule among all blocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from bench.cache_replay.workloads import CacheRequest
from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.interface import NO_MARK, Mark, no_leaf
from kvmanager.contracts.block import Blocks

_NEVER = 1 << 60


Uses = Mapping[BlockHash, Sequence[int]]
"""The numbers of the requests whose prompts have a block, ascending."""


def uses_of(requests: Sequence[CacheRequest]) -> Uses:
    uses: dict[BlockHash, list[int]] = {}
    for number, request in enumerate(requests):
        for block in request.prompt:
            uses.setdefault(block, []).append(number)
    return uses


class Clairvoyant:
    """Cached leaves in a heap by their next use; a stale item of the heap is skipped."""

    name: ClassVar[str] = "limit"
    reason: ClassVar[str] = "used again last of all"

    def __init__(self, uses: Uses, blocks: Blocks, entries: dict[BlockHash, BlockId]) -> None:
        self._uses, self._blocks, self._entries = uses, blocks, entries
        self._request = 0
        self.withheld: Collection[BlockId] = ()
        self._next: dict[BlockId, int] = {}
        self._heap: list[tuple[int, BlockId]] = []

    def now_at(self, request: int) -> None:
        """Note that a request is served now; its uses and those before it count no more."""
        self._request = request

    def empty(self) -> None:
        self._next.clear()
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._next)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._next

    def __iter__(self) -> Iterator[BlockId]:
        return iter(list(self._next))

    def add_block(self, block: BlockId) -> None:
        block_hash = self._blocks.hash[block]
        assert block_hash is not None
        uses = self._uses.get(block_hash, ())
        place = bisect_right(uses, self._request)
        self._next[block] = uses[place] if place < len(uses) else _NEVER
        if not self._blocks.children[block]:
            heapq.heappush(self._heap, (-self._next[block], block))

    def restore_blocks(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.add_block(block)

    def reuse_block(self, block: BlockId) -> None:
        del self._next[block]

    def discard_block(self, block: BlockId) -> None:
        del self._next[block]

    def replace_block(self, old: BlockId, by: BlockId) -> None:
        del self._next[old]

    def note_registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
        """Change nothing."""

    def forget_content(self, content: BlockHash) -> None:
        """Change nothing: what comes is known."""

    def note_used(self, block: BlockId) -> None:
        """Change nothing."""

    def pop_block(self) -> BlockId:
        if not self.can_pop():
            raise no_leaf() if self._next else IndexError("nothing is cached")
        _, block = heapq.heappop(self._heap)
        self.pop_withheld(block)
        return block

    def can_pop(self) -> bool:
        heap = self._heap
        while heap:
            comes, block = heap[0]
            stale = self._next.get(block) != -comes or self._blocks.children[block]
            if not stale and block not in self.withheld:
                return True
            heapq.heappop(heap)
        return False

    def withhold_block(self, block: BlockId) -> None:
        """Change nothing: its item of the heap is skipped."""

    def offer_block(self, block: BlockId) -> None:
        if not self._blocks.children[block]:
            heapq.heappush(self._heap, (-self._next[block], block))

    def pop_withheld(self, block: BlockId) -> None:
        del self._next[block]
        parent = self._blocks.parent[block]
        if parent:
            above = self._entries[parent]
            if self._blocks.children[above] == 1 and above in self._next:
                heapq.heappush(self._heap, (-self._next[above], above))

    def mark_of(self, block: BlockId) -> Mark:
        return NO_MARK

    def explain_choice(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ()

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ()
