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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from common.clock import Clock
from common.lease import DEFAULT_RETENTION_PRIORITY
from common.types import TRIMMED, BlockHash, BlockId
from kvmanager.core.block import Blocks
from kvmanager.core.config import RetentionLimits
from kvmanager.core.eviction.interface import EvictionOrder
from kvmanager.core.holdings import Holdings
from kvmanager.core.sequence import Sequence

_USUAL: Final = DEFAULT_RETENTION_PRIORITY
_SPARE: Final = 64
"""Stale items that a heap may have beside as many as there are held blocks."""
_MOST_TERMS: Final = 4
"""Of one content. Each release compares them with its own."""

Term = tuple[int, float]
"""A priority, and the time at which it ends."""
Terms = tuple[Term, ...]
"""Of falling priority and rising end: all above 35, or one below it."""


class Fate(StrEnum):
    """What became of a mark by the time its block was evicted."""

    RETAINED = "no block without retention was left"
    OVER = "its retention was over"
    BEYOND = "its tenant retained more than its share of the pool"
    CROWDED = "all tenants retained more than half of the pool"
    LOWERED = "its request gave it a low priority"


class Mark:
    """What requests said of contents: terms, and who said so last. `fate` is set once there is no term left.

    Contents share a mark that one request made: it changes by time alone.
    """

    __slots__ = ("fate", "tenant", "terms")

    def __init__(self, terms: Terms, tenant: str, fate: Fate | None = None) -> None:
        self.terms, self.tenant, self.fate = terms, tenant, fate


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
    tenant's retained blocks are bounded, and those of all tenants. Beyond a bound, the block falls back to the usual
    order that was released first: of that tenant, or of the one that retains the most.
    """

    __slots__ = (
        "_blocks", "_clock", "_due", "_early", "_entries", "_holdings", "_late", "_limits", "_order", "_stamp",
        "evicted", "held", "marks",
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
        self._limits, self._holdings = limits, Holdings()
        self.marks: dict[BlockHash, Mark] = {}
        self.held: dict[BlockId, Held] = {}
        # Leaves that leave before, and after, the usual order: (priority, stamp, block). Stale items are skipped.
        self._early: list[tuple[int, int, BlockId]] = []
        self._late: list[tuple[int, int, BlockId]] = []
        # When a term of a held block ends: (time, stamp, block).
        self._due: list[tuple[float, int, BlockId]] = []
        self._stamp = 0
        # What became of the block that was evicted last; None: it had no mark.
        self.evicted: Evicted | None = None
        self.follow(order)

    def follow(self, order: EvictionOrder) -> None:
        """Hold blocks outside of this order from now on."""
        self._order, order.withheld = order, self.held

    def clear(self) -> None:
        """Forget all marks."""
        for each in (self.marks, self.held, self._early, self._late, self._due, self._holdings):
            each.clear()
        self.evicted = None

    # ------------------------------------------------------------ what requests say

    def mark(self, sequence: Sequence) -> None:
        """Mark the registered blocks of a sequence that is about to release them.

        Blocks between two ends of ranges get the same terms, and most of them have the same mark before. So terms are
        compared once for all of them.
        """
        now, table, blocks, marks = self._clock.monotonic(), sequence.block_table, self._blocks, self.marks
        for first, end, terms in _segments(self._asked(sequence, now)):
            fresh, low = Mark(terms, sequence.tenant), terms[0][0] < _USUAL
            known: dict[Mark | None, Mark] = {None: fresh}
            for block in table[first:end]:
                block_hash = blocks.hash[block] if block != TRIMMED else None
                if block_hash is None or (low and blocks.refs[block] > 1):
                    continue
                old = marks.get(block_hash)
                mark = known.get(old)
                if mark is None:
                    assert old is not None
                    mark = known[old] = _merged(old, fresh, now)
                if mark is not old:
                    marks[block_hash] = mark

    def _asked(self, sequence: Sequence, now: float) -> list[tuple[int, int, Term]]:
        """Return the blocks of which a sequence says something, and what.

        A retained range begins with the first block, as the blocks before it must stay too. A low priority counts for
        blocks alone that no other sequence had computed before, and that no other one uses.
        """
        limits, size, found = self._limits, len(sequence.block_table), []
        for asked in sequence.retention:
            raised, term = asked.priority > _USUAL, (asked.priority, now + min(asked.seconds, limits.longest_seconds))
            if asked.priority == _USUAL or term[1] <= now or (raised and not limits.most_blocks):
                continue
            first = 0 if raised else max(asked.first, sequence.n_shared)
            if first < min(asked.end, size):
                found.append((first, min(asked.end, size), term))
        return found

    # ------------------------------------------------------------ what happens to blocks

    def cached(self, block: BlockId) -> None:
        """Hold a block that was just added to the usual order, if its content is marked."""
        block_hash = self._blocks.hash[block]
        mark = self.marks.get(block_hash) if block_hash is not None else None
        if block_hash is None or mark is None:
            return
        now = self._clock.monotonic()
        self._expire(now)
        if not _renew(mark, now):
            return
        self._stamp += 1
        held = self.held[block] = Held(block_hash, mark, mark.terms[0][0], self._stamp)
        self._order.withhold(block)
        self._await(block, held)
        if held.priority > _USUAL:
            self._retain(block, mark.tenant)
        self._compact()

    def _retain(self, block: BlockId, tenant: str) -> None:
        """Count a retained block, and let the first one go of who retains too many."""
        holdings, limits, fate = self._holdings, self._limits, Fate.BEYOND
        holdings.add(tenant, block)
        if holdings.count(tenant) <= limits.most_blocks:
            if holdings.total <= limits.most_of_all:
                return
            tenant, fate = holdings.largest(tenant), Fate.CROWDED
        first = holdings.first(tenant)
        self.marks[self.held[first].hash] = Mark((), tenant, fate)
        self._let_go(first)

    def taken(self, block: BlockId) -> None:
        """Let a cached block go that is used again. It stays marked if it was retained."""
        held = self._drop(block)
        block_hash = self._blocks.hash[block]
        if block_hash is not None and (held is None or held.priority < _USUAL):
            self.marks.pop(block_hash, None)

    def forget_cached(self) -> None:
        """Forget the marks of all cached blocks, because they were freed, although not for room."""
        for each in (self.held, self._early, self._late, self._due, self._holdings):
            each.clear()
        for block_hash in [each for each in self.marks if each not in self._entries]:
            del self.marks[block_hash]

    def replaced(self, block: BlockId) -> None:
        """Let a cached block go whose content another block has from now on; that keeps the mark."""
        self._drop(block)

    def expire(self) -> None:
        """Give the blocks back to the usual order whose time is over."""
        self._expire(self._clock.monotonic())

    def _expire(self, now: float) -> None:
        due = self._due
        while due and due[0][0] <= now:
            _, stamp, block = heapq.heappop(due)
            held = self.held.get(block)
            if held is None or held.stamp != stamp:
                continue
            if _renew(held.mark, now):
                held.priority = held.mark.terms[0][0]
                self._await(block, held)
            else:
                self._let_go(block)

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
        return self._holdings.total if tenant is None else self._holdings.count(tenant)

    # ------------------------------------------------------------ within

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

    def _let_go(self, block: BlockId) -> None:
        """Give a held block back to the usual order. Its mark has its fate."""
        self._drop(block)
        self._order.offer(block)

    def _drop(self, block: BlockId) -> Held | None:
        held = self.held.pop(block, None)
        if held is not None and held.priority > _USUAL:
            self._holdings.remove(held.mark.tenant, block)
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


def _segments(asked: list[tuple[int, int, Term]]) -> Iterator[tuple[int, int, Terms]]:
    """Yield the blocks between the ends of ranges, and the terms that all blocks of such a part get."""
    cuts = sorted({cut for first, end, _ in asked for cut in (first, end)})
    for first, end in pairwise(cuts):
        terms = [term for begin, until, term in asked if begin <= first and end <= until]
        raised = _needed(each for each in terms if each[0] > _USUAL)
        if terms:
            yield first, end, raised or (terms[-1],)


def _needed(raised: Iterable[Term]) -> Terms:
    """Return the terms that say more than others do, in their order. Of many, the highest and the longest stay."""
    kept = list[Term]()
    for each in sorted(raised, reverse=True):
        if not kept or each[1] > kept[-1][1]:
            kept.append(each)
    return tuple(kept if len(kept) <= _MOST_TERMS else (*kept[: _MOST_TERMS - 1], kept[-1]))


def _merged(old: Mark, fresh: Mark, now: float) -> Mark:
    """Return the mark of contents that have an old one. What is retained stays so, whatever another request says."""
    raised = tuple(each for each in old.terms if each[1] > now and each[0] > _USUAL)
    if not raised:
        return fresh
    if fresh.terms[0][0] < _USUAL:
        return old
    terms = _needed((*raised, *fresh.terms))
    if terms == raised:
        return old
    return fresh if terms == fresh.terms else Mark(terms, fresh.tenant)


def _renew(mark: Mark, now: float) -> bool:
    """Drop the terms of a mark that are over, and return whether one is left."""
    if mark.terms and mark.terms[0][1] <= now:
        mark.terms = tuple(each for each in mark.terms if each[1] > now)
        if not mark.terms:
            mark.fate = Fate.OVER
    return bool(mark.terms)
