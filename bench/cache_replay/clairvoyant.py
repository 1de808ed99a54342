"""The limit: the leaf goes whose next use is the farthest. It knows all requests; no policy can do better.

With blocks of one size, each of which must be computed when it is missing, Belady's rule is optimal. A parent is used
whenever its child is. So its next use is never later, and the rule among leaves is the rule among all blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import ClassVar

from bench.cache_replay.workloads import CacheRequest
from common.types import BlockHash, BlockId
from kvmanager.core.block import Block
from kvmanager.core.eviction.interface import NO_MARK, Mark
from kvmanager.core.prefix_cache import Entry

_NEVER = 1 << 60


def next_uses(requests: Sequence[CacheRequest]) -> list[dict[BlockHash, int]]:
    """Return, for each request, the number of the next request whose prompt has the block; absent: there is none."""
    coming: dict[BlockHash, int] = {}
    found: list[dict[BlockHash, int]] = [{}] * len(requests)
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        found[number] = {block: coming[block] for block in (*request.prompt, *request.output) if block in coming}
        coming.update(dict.fromkeys(request.prompt, number))
    return found


class Clairvoyant:
    """Cached leaves in a heap by their next use; a stale item of the heap is skipped."""

    name: ClassVar[str] = "limit"
    reason: ClassVar[str] = "used again last of all"

    def __init__(self, coming: list[dict[BlockHash, int]], entries: dict[BlockHash, Entry]) -> None:
        self._coming, self._entries = coming, entries
        self._request = 0
        self._next: dict[BlockId, tuple[int, BlockHash]] = {}
        self._heap: list[tuple[int, BlockId]] = []

    def now_at(self, request: int) -> None:
        """Note that a request is served now."""
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

    def add(self, block: Block) -> None:
        assert block.hash is not None
        comes = self._coming[self._request].get(block.hash, _NEVER)
        self._next[block.id] = (comes, block.hash)
        if not self._entries[block.hash].children:
            heapq.heappush(self._heap, (-comes, block.id))

    def take(self, block: Block) -> None:
        del self._next[block.id]

    def discard(self, block: Block) -> None:
        del self._next[block.id]

    def replaced(self, old: Block, by: Block) -> None:
        del self._next[old.id]

    def registered(self, block: Block, parent: BlockId | None, mark: Mark) -> None:
        """Change nothing."""

    def used(self, block: Block) -> None:
        """Change nothing."""

    def pop(self) -> BlockId:
        while True:
            comes, block = heapq.heappop(self._heap)
            known = self._next.get(block)
            if known is None or known[0] != -comes:
                continue
            entry = self._entries[known[1]]
            if not entry.children:
                break
        del self._next[block]
        if entry.parent:
            above = self._entries[entry.parent]
            if above.children == 1 and above.blocks[0] in self._next:
                heapq.heappush(self._heap, (-self._next[above.blocks[0]][0], above.blocks[0]))
        return block

    def mark_of(self, block: BlockId) -> Mark:
        return NO_MARK

    def why(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ()
