"""Blocks that leave before or after the usual order of eviction, because their requests said so, for a while.

A request gives ranges of its blocks a priority from 0 to 100 and a duration that counts from its release. 35 is that of
every other block. A cached block of a higher priority is retained: it leaves after all others, the lowest priority
first. One of a lower priority leaves before them. Once the duration is over, a block stands where the policy of
eviction has it.

Only leaves leave, whatever their priority. A retained block would therefore hold the blocks before it. So they get at
least its priority for at least its time, and count as retained too.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.clock import Clock
from common.lease import DEFAULT_RETENTION_PRIORITY, RetainedBlocks
from common.types import TRIMMED, BlockHash, BlockId
from kvmanager.core.block import Blocks
from kvmanager.core.config import RetentionLimits
from kvmanager.core.eviction.interface import EvictionOrder
from kvmanager.core.sequence import Sequence

_USUAL: Final = DEFAULT_RETENTION_PRIORITY
_SPARE: Final = 64
"""Stale items that a heap may have beside as many as there are held blocks."""

Term = tuple[int, float]
"""A priority, and the time at which it ends."""


class Fate(StrEnum):
    """What became of a mark by the time its block was evicted."""

    RETAINED = "no block without retention was left"
    OVER = "its retention was over"
    BEYOND = "its tenant retained more than its share of the pool"
    LOWERED = "its request gave it a low priority"


class Mark:
    """What requests said of one content: terms of falling priority and rising end, and who said so last.

    `fate` is set once there is no term left.
    """

    __slots__ = ("fate", "tenant", "terms")

    def __init__(self, term: Term, tenant: str) -> None:
        self.terms: tuple[Term, ...] = (term,)
        self.tenant = tenant
        self.fate: Fate | None = None


class Held:
    """A cached block that stands outside of the usual order. `stamp` rises from one caching to the next."""

    __slots__ = ("hash", "mark", "priority", "stamp")

    def __init__(self, block_hash: BlockHash, mark: Mark, priority: int, stamp: int) -> None:
        self.hash, self.mark, self.priority, self.stamp = block_hash, mark, priority, stamp


@dataclass(frozen=True, slots=True)
class Evicted:
    """The retention of a block that was evicted: what became of it, and its priority (35 once it had ended)."""

    fate: Fate
    priority: int = _USUAL


class Retention:
    """The marks of registered contents, and the cached blocks that they hold outside of the usual order.

    `marks` is empty while no request asks for retention; callers look at it before they call anything else here. A
    tenant's retained blocks are at most `most`; the one that was released first makes room. Durations are at most
    `longest` seconds.
    """

    __slots__ = (
        "_blocks", "_by_tenant", "_clock", "_due", "_early", "_entries", "_late", "_longest", "_most", "_order",
        "_stamp", "evicted", "held", "marks",
    )  # fmt: skip

    def __init__(
        self,
        blocks: Blocks,
        entries: dict[BlockHash, BlockId],
        order: EvictionOrder,
        clock: Clock,
        limits: RetentionLimits,
    ) -> None:
        self._blocks, self._entries, self._clock = blocks, entries, clock
        self._most, self._longest = limits.most_blocks, limits.longest_seconds
        self.marks: dict[BlockHash, Mark] = {}
        self.held: dict[BlockId, Held] = {}
        # Leaves that leave before, and after, the usual order: (priority, stamp, block). Stale items are skipped.
        self._early: list[tuple[int, int, BlockId]] = []
        self._late: list[tuple[int, int, BlockId]] = []
        # When a term of a held block ends: (time, stamp, block).
        self._due: list[tuple[float, int, BlockId]] = []
        # The retained blocks of each tenant, the first released first.
        self._by_tenant: dict[str, OrderedDict[BlockId, None]] = {}
        self._stamp = 0
        # What became of the block that was evicted last; None: it had no mark.
        self.evicted: Evicted | None = None
        self.follow(order)

    def follow(self, order: EvictionOrder) -> None:
        """Hold blocks outside of this order from now on."""
        self._order, order.withheld = order, self.held

    def clear(self) -> None:
        """Forget all marks."""
        for each in (self.marks, self.held, self._early, self._late, self._due, self._by_tenant):
            each.clear()
        self.evicted = None

    # ------------------------------------------------------------ what requests say

    def mark(self, sequence: Sequence) -> None:
        """Mark the registered blocks of a sequence that is about to release them."""
        now, table, hash_of = self._clock.monotonic(), sequence.block_table, self._blocks.hash
        for asked in sequence.retention:
            term = (asked.priority, now + min(asked.seconds, self._longest))
            if asked.priority == _USUAL or term[1] <= now or (asked.priority > _USUAL and not self._most):
                continue
            for block in table[_first_of(asked, sequence) : asked.end]:
                block_hash = hash_of[block] if block != TRIMMED else None
                if block_hash is not None:
                    self._add(block_hash, term, sequence.tenant, now)

    def _add(self, block_hash: BlockHash, term: Term, tenant: str, now: float) -> None:
        """Add a term to those of a content. What is retained stays so, whatever another request says."""
        old = self.marks.get(block_hash)
        terms = [each for each in old.terms if each[1] > now] if old is not None else []
        if old is None or not terms:
            self.marks[block_hash] = Mark(term, tenant)
        elif term[0] < _USUAL:
            if terms[0][0] < _USUAL:
                old.terms, old.tenant = (term,), tenant
        elif not any(each[0] >= term[0] and each[1] >= term[1] for each in terms):
            kept = [each for each in terms if each[0] >= _USUAL and (each[0] > term[0] or each[1] > term[1])]
            old.terms, old.tenant = tuple(sorted((*kept, term), reverse=True)), tenant

    # ------------------------------------------------------------ what happens to blocks

    def cached(self, block: BlockId) -> None:
        """Hold a block that was just added to the usual order, if its content is marked."""
        block_hash = self._blocks.hash[block]
        mark = self.marks.get(block_hash) if block_hash is not None else None
        if block_hash is None or mark is None or not self._renew(mark):
            return
        self._stamp += 1
        held = self.held[block] = Held(block_hash, mark, mark.terms[0][0], self._stamp)
        self._order.withhold(block)
        self._await(block, held)
        if held.priority > _USUAL:
            mine = self._by_tenant.setdefault(mark.tenant, OrderedDict())
            mine[block] = None
            if len(mine) > self._most:
                self.expire()
            if len(mine) > self._most:
                self._let_go(next(iter(mine)), Fate.BEYOND)
        self._compact()

    def taken(self, block: BlockId) -> None:
        """Let a cached block go that is used again. It stays marked if it was retained."""
        held = self._drop(block)
        block_hash = self._blocks.hash[block]
        if block_hash is not None and (held is None or held.priority < _USUAL):
            self.marks.pop(block_hash, None)

    def forget_cached(self) -> None:
        """Forget the marks of all cached blocks, because they were freed, although not for room."""
        for each in (self.held, self._early, self._late, self._due, self._by_tenant):
            each.clear()
        for block_hash in [each for each in self.marks if each not in self._entries]:
            del self.marks[block_hash]

    def replaced(self, block: BlockId) -> None:
        """Let a cached block go whose content another block has from now on; that keeps the mark."""
        self._drop(block)

    def expire(self) -> None:
        """Give the blocks back to the usual order whose time is over."""
        now, due = self._clock.monotonic(), self._due
        while due and due[0][0] <= now:
            _, stamp, block = heapq.heappop(due)
            held = self.held.get(block)
            if held is None or held.stamp != stamp:
                continue
            if self._renew(held.mark):
                held.priority = held.mark.terms[0][0]
                self._await(block, held)
            else:
                self._let_go(block, Fate.OVER)

    def pop(self) -> BlockId:
        """Let the next block go: of a low priority, in the usual order, retained. Raises as the usual order does."""
        self.expire()
        order, block = self._order, self._first(self._early)
        if block is None and not order.can_pop():
            block = self._first(self._late)
        if block is None:
            block = order.pop()
        else:
            order.evict(block)
        self._note(block)
        return block

    def count(self, tenant: str | None = None) -> int:
        """Return how many cached blocks are retained, of one tenant or of all."""
        if tenant is not None:
            return len(self._by_tenant.get(tenant, ()))
        return sum(map(len, self._by_tenant.values()))

    # ------------------------------------------------------------ within

    def _renew(self, mark: Mark) -> bool:
        """Drop the terms of a mark that are over, and return whether one is left."""
        if mark.terms:
            now = self._clock.monotonic()
            mark.terms = tuple(each for each in mark.terms if each[1] > now)
            if not mark.terms:
                mark.fate = Fate.OVER
        return bool(mark.terms)

    def _await(self, block: BlockId, held: Held) -> None:
        """Wait for the end of a held block's first term, and let it be chosen while it is a leaf."""
        heapq.heappush(self._due, (held.mark.terms[0][1], held.stamp, block))
        if not self._blocks.children[block]:
            self._offer(block, held)

    def _offer(self, block: BlockId, held: Held) -> None:
        heap = self._late if held.priority > _USUAL else self._early
        heapq.heappush(heap, (held.priority, held.stamp, block))

    def _first(self, heap: list[tuple[int, int, BlockId]]) -> BlockId | None:
        """Return the first leaf of a heap that is still held so, and take it from the heap; None: there is none."""
        while heap:
            priority, stamp, block = heapq.heappop(heap)
            held = self.held.get(block)
            if held is not None and (held.stamp, held.priority) == (stamp, priority):
                return block
        return None

    def _let_go(self, block: BlockId, fate: Fate) -> None:
        """Give a held block back to the usual order."""
        held = self._drop(block)
        assert held is not None
        held.mark.terms, held.mark.fate = (), fate
        self._order.offer(block)

    def _drop(self, block: BlockId) -> Held | None:
        held = self.held.pop(block, None)
        if held is not None and held.priority > _USUAL:
            mine = self._by_tenant[held.mark.tenant]
            del mine[block]
            if not mine:
                del self._by_tenant[held.mark.tenant]
        return held

    def _note(self, block: BlockId) -> None:
        """Note what became of a popped block's mark; the block before it may be a leaf now."""
        held, block_hash = self._drop(block), self._blocks.hash[block]
        mark = self.marks.pop(block_hash, None) if block_hash is not None else None
        self.evicted = None
        if held is not None:
            self.evicted = Evicted(Fate.RETAINED if held.priority > _USUAL else Fate.LOWERED, held.priority)
        elif mark is not None and mark.fate is not None:
            self.evicted = Evicted(mark.fate)
        parent = self._blocks.parent[block]
        above = self._entries.get(parent) if parent else None
        if above is not None and self._blocks.children[above] == 1 and above in self.held:
            self._offer(above, self.held[above])

    def _compact(self) -> None:
        """Make the heaps anew when most of their items are stale."""
        most = 2 * len(self.held) + _SPARE
        if len(self._due) > most:
            self._due = [(each.mark.terms[0][1], each.stamp, block) for block, each in self.held.items()]
            heapq.heapify(self._due)
        if len(self._late) > most or len(self._early) > most:
            self._late, self._early = [], []
            for block, each in self.held.items():
                if not self._blocks.children[block]:
                    self._offer(block, each)


def _first_of(asked: RetainedBlocks, sequence: Sequence) -> int:
    """Return where a range begins to count. A retained one begins with the first block, as the blocks before it must
    stay too. A low priority counts for blocks alone that no other sequence had computed before.
    """
    return 0 if asked.priority > _USUAL else max(asked.first, sequence.n_shared)
