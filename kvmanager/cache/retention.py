"""Blocks that leave before or after the usual order of eviction, because their requests said so, for a while.

A request gives ranges of its blocks a priority from 0 to 100 and a duration that counts from its release. 35 is that of
every other block. A cached block of a higher priority is retained: it leaves after all others, the lowest priority
first. One of a lower priority leaves before them. Once the duration is over, a block stands where the policy of
eviction has it.

Only leaves leave, whatever their priority. A retained block would therefore hold the blocks before it. So they get at
least its priority for at least its time, and count as retained too.

An operator pins whole prefixes (`pins.py`). Their cached blocks leave after all others, without an end. What requests
say of the same contents is kept beside that, and counts once the pin is gone. Requests retain what pins leave of the
share of all tenants.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from common.contracts.clock import Clock
from common.contracts.hashing import group_in
from common.contracts.lease import DEFAULT_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY
from common.contracts.types import TRIMMED, BlockHash, BlockId
from kvmanager.cache.eviction.interface import EvictionOrder
from kvmanager.cache.retention_terms import Fate, Mark, Term, merged, renew, segments
from kvmanager.contracts.block import Blocks, BlockState
from kvmanager.contracts.ledger_config import RetentionLimits
from kvmanager.contracts.sequence import Sequence

_SPARE: Final = 64
"""Stale items that a heap may have beside as many as there are current ones."""


# How many cached blocks each tenant retains, and which tenant retains the most.
class Holdings:
    """The retained blocks of each tenant, the first released first. Where the pool has groups, counts are of pages.

    Each method takes O(log n) for n changes of tenants that still hold something.
    """

    __slots__ = ("_by_tenant", "_counts", "_heap", "_stamp", "total")

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[BlockId, int]] = {}
        # What each tenant retains, and since which change; and the same as (-count, change, tenant), some of it stale.
        self._counts: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._stamp = self.total = 0

    def clear(self) -> None:
        self._by_tenant.clear()
        self._counts.clear()
        self._heap.clear()
        self.total = 0

    def count(self, tenant: str) -> int:
        return self._counts.get(tenant, (0, 0))[0]

    def first(self, tenant: str) -> BlockId:
        """Return the block of a tenant that was released first. The tenant retains one."""
        return next(iter(self._by_tenant[tenant]))

    def largest(self, tenant: str) -> str:
        """Return who retains the most: of equals this tenant, or the one that has had so much for the longest time."""
        heap = self._heap
        while self._counts.get(heap[0][2]) != (-heap[0][0], heap[0][1]):
            heapq.heappop(heap)
        return tenant if self.count(tenant) == -heap[0][0] else heap[0][2]

    def add(self, tenant: str, block: BlockId, pages: int = 1) -> None:
        self._by_tenant.setdefault(tenant, OrderedDict())[block] = pages
        self._change(tenant, pages)

    def remove(self, tenant: str, block: BlockId) -> None:
        mine = self._by_tenant[tenant]
        pages = mine.pop(block)
        if not mine:
            del self._by_tenant[tenant]
        self._change(tenant, -pages)

    def _change(self, tenant: str, pages: int) -> None:
        self.total += pages
        self._stamp += 1
        count = self.count(tenant) + pages
        if not count:
            del self._counts[tenant]
            return
        self._counts[tenant] = count, self._stamp
        heapq.heappush(self._heap, (-count, self._stamp, tenant))
        if len(self._heap) > 2 * len(self._counts) + _SPARE:
            self._heap = [(-count, stamp, each) for each, (count, stamp) in self._counts.items()]
            heapq.heapify(self._heap)


_USUAL: Final = DEFAULT_RETENTION_PRIORITY
PINNED_PRIORITY: Final = MAX_RETENTION_PRIORITY + 1
"""Of blocks that an operator pinned: no request can give it."""
_A_STEP: Final = 1024
"""Contents that one step pins or unpins: some 5 to 10 microseconds each where they are cached."""


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

    `marks` is empty while no request asks for retention, `pinned` while no operator pins; callers look at both before
    they call anything else here. A tenant's retained blocks are bounded, and those of all tenants. Beyond a bound, the
    block falls back to the usual order that was released first: of that tenant, or of the one that retains the most.
    """

    __slots__ = (
        "_block_pages", "_blocks", "_clock", "_due", "_early", "_entries", "_holdings", "_late", "_limits", "_order",
        "_pinned_pages", "_stamp", "evicted", "held", "marks", "pinned", "pinned_cached",
    )  # fmt: skip

    def __init__(
        self,
        blocks: Blocks,
        entries: dict[BlockHash, BlockId],
        order: EvictionOrder,
        clock: Clock,
        limits: RetentionLimits,
        block_pages: tuple[int, ...] = (1,),
    ) -> None:
        """`block_pages` are those of a block of each group."""
        self._block_pages, self._pinned_pages = block_pages, 0
        self._blocks, self._entries, self._clock = blocks, entries, clock
        self._limits, self._holdings = limits, Holdings()
        self.marks: dict[BlockHash, Mark] = {}
        # The contents that an operator pinned, registered or not, and how many of their blocks are cached.
        self.pinned: dict[BlockHash, Mark] = {}
        self.pinned_cached = 0
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
        """Forget all marks, and all blocks. What is pinned stays pinned."""
        self.marks.clear()
        self._forget_held()
        self.evicted = None

    def _forget_held(self) -> None:
        for each in (self.held, self._early, self._late, self._due, self._holdings):
            each.clear()
        self.pinned_cached = 0

    # ------------------------------------------------------------ what requests say

    def mark_blocks(self, sequence: Sequence, table: list[BlockId], begin: int = 0, until: int | None = None) -> None:
        """Mark the registered blocks of a table that is about to be released: `begin` to `until` - 1, or all.

        Blocks between two ends of ranges get the same terms, and most of them have the same mark before. So terms are
        compared once for all of them.
        """
        now, blocks, marks = self._clock.monotonic(), self._blocks, self.marks
        until = len(table) if until is None else until
        for first, end, terms in segments(self._asked(sequence, now, begin, until)):
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
                    mark = known[old] = merged(old, fresh, now)
                if mark is not old:
                    marks[block_hash] = mark

    def _asked(self, sequence: Sequence, now: float, begin: int, until: int) -> list[tuple[int, int, Term]]:
        """Return the blocks of which a sequence says something, and what.

        A retained range begins with the first block, as the blocks before it must stay too. A low priority counts for
        blocks alone that no other request had computed before, and that no other sequence uses.
        """
        limits, found = self._limits, []
        for asked in sequence.retention:
            raised, term = asked.priority > _USUAL, (asked.priority, now + min(asked.seconds, limits.longest_seconds))
            if asked.priority == _USUAL or term[1] <= now or (raised and not limits.most_blocks):
                continue
            first = max(begin, 0 if raised else max(asked.first, sequence.own_from))
            if first < min(asked.end, until):
                found.append((first, min(asked.end, until), term))
        return found

    # ------------------------------------------------------------ what happens to blocks

    def note_cached(self, block: BlockId) -> None:
        """Hold a block of the usual order, if its content is pinned or marked."""
        block_hash = self._blocks.hash[block]
        if block_hash is None:
            return
        mark = self.pinned.get(block_hash) or self.marks.get(block_hash)
        if mark is None:
            return
        now = self._clock.monotonic()
        self._expire(now)
        if not renew(mark, now):
            return
        self._stamp += 1
        held = self.held[block] = Held(block_hash, mark, mark.terms[0][0], self._stamp)
        self._order.withhold_block(block)
        self._await(block, held)
        if held.priority == PINNED_PRIORITY:
            self.pinned_cached += 1
        elif held.priority > _USUAL:
            self._retain(block, mark.tenant)
        self._compact()

    def _retain(self, block: BlockId, tenant: str) -> None:
        """Count a retained block, and let the first ones go of who retains too many."""
        holdings, limits, pages = self._holdings, self._limits, self._blocks.pages_of(block)
        holdings.add(tenant, block, pages)
        if pages > limits.most_blocks:
            self._let_fall(block, tenant, Fate.BEYOND)
        while holdings.count(tenant) > limits.most_blocks:
            self._fall_back(tenant, Fate.BEYOND)
        while holdings.total > self._most_of_all:
            self._fall_back(holdings.largest(tenant), Fate.CROWDED)

    @property
    def _most_of_all(self) -> int:
        """The blocks that requests of all tenants may retain: those that pins leave, whether cached or not."""
        return max(0, self._limits.most_of_all - self._pinned_pages)

    def _fall_back(self, tenant: str, fate: Fate) -> None:
        """Let the retained block of a tenant go back that was released first."""
        self._let_fall(self._holdings.first(tenant), tenant, fate)

    def _let_fall(self, block: BlockId, tenant: str, fate: Fate) -> None:
        self.marks[self.held[block].hash] = Mark((), tenant, fate)
        self._let_go(block)

    def note_taken(self, block: BlockId) -> None:
        """Let a cached block go that is used again. It stays marked if a request retained it."""
        self._drop(block)
        block_hash = self._blocks.hash[block]
        mark = self.marks.get(block_hash) if block_hash is not None else None
        if block_hash is not None and mark is not None and (not mark.terms or mark.terms[0][0] < _USUAL):
            del self.marks[block_hash]

    def forget_cached(self) -> None:
        """Forget the marks of all cached blocks, because they were freed, although not for room."""
        self._forget_held()
        for block_hash in [each for each in self.marks if each not in self._entries]:
            del self.marks[block_hash]

    def note_replaced(self, block: BlockId) -> None:
        """Let a cached block go whose content another block has from now on; that keeps the mark."""
        self._drop(block)

    def expire_terms(self) -> None:
        """Give the blocks back to the usual order whose time is over."""
        self._expire(self._clock.monotonic())

    def _expire(self, now: float) -> None:
        due = self._due
        while due and due[0][0] <= now:
            _, stamp, block = heapq.heappop(due)
            held = self.held.get(block)
            if held is None or held.stamp != stamp:
                continue
            if renew(held.mark, now):
                held.priority = held.mark.terms[0][0]
                self._await(block, held)
            else:
                self._let_go(block)

    def pop_block(self) -> BlockId:
        """Let the next block go: of a low priority, in the usual order, retained. Raises as the usual order does."""
        self.expire_terms()
        order, block = self._order, self._first(self._early)
        if block is None and not order.can_pop():
            block = self._first(self._late)
        if block is None:
            block = order.pop_block()
        else:
            order.pop_withheld(block)
        self._note(block)
        return block

    def pop_early(self, block: BlockId) -> None:
        """Let a cached leaf go that is not kept, before all others."""
        if block not in self.held:
            self._order.withhold_block(block)
        self._order.pop_withheld(block)
        self._note(block)

    def keeps(self, block: BlockId) -> bool:
        """Return whether a cached block leaves after the usual order: it is retained or pinned."""
        held = self.held.get(block)
        return held is not None and held.priority > _USUAL

    def count_retained(self, tenant: str | None = None) -> int:
        """Return how many cached blocks are retained, of one tenant or of all."""
        return self._holdings.total if tenant is None else self._holdings.count(tenant)

    # ------------------------------------------------------------ what operators say

    def pin_in_steps(self, wanted: Mapping[BlockHash, str]) -> Iterator[None]:
        """Let these contents be pinned from now on, each for a tenant, and no others: in steps of some milliseconds.

        Anything but another change of the pins may happen between two steps.
        """
        pinned, entries, marks = self.pinned, self._entries, dict[str, Mark]()
        # Neither a list of all nor an object for each: a walk of the collector over new objects visits every one of
        # them at once, some 20 ms.
        unpinned, kept = dict[str, Mark](), 0
        while kept < len(pinned):
            step = list(islice(pinned, kept, kept + _A_STEP))
            gone = [each for each in step if each not in wanted]
            for block_hash in gone:
                del pinned[block_hash]
                self._pinned_pages -= self._block_pages[group_in(block_hash)]
                self._unpin(block_hash, unpinned)
            kept += len(step) - len(gone)
            yield
        for number, (block_hash, tenant) in enumerate(wanted.items(), 1):
            if block_hash not in pinned:
                mark = marks.get(tenant)
                if mark is None:
                    mark = marks[tenant] = Mark(((PINNED_PRIORITY, math.inf),), tenant)
                pinned[block_hash] = mark
                self._pinned_pages += self._block_pages[group_in(block_hash)]
                if block_hash in entries:
                    self.hold_pinned(block_hash)
            if number % _A_STEP == 0:
                self._leave_room_for_pins()
                yield
        self._leave_room_for_pins()

    def _leave_room_for_pins(self) -> None:
        """Let retained blocks go that are beyond what pins leave."""
        while self._holdings.total > self._most_of_all:
            self._fall_back(self._holdings.largest(""), Fate.CROWDED)

    def hold_pinned(self, block_hash: BlockHash) -> None:
        """Hold the block of a pinned content if it is cached. Nothing happens where it is held as such already."""
        block = self._entries.get(block_hash)
        if block is None or self._blocks.state[block] is not BlockState.CACHED:
            return
        held = self.held.get(block)
        if held is not None and held.priority == PINNED_PRIORITY:
            return
        if held is not None:
            self._drop(block)
        self.note_cached(block)

    def _unpin(self, block_hash: BlockHash, known: dict[str, Mark]) -> None:
        """Let the block of a content that is pinned no more go back to its place, or to the one that requests want.

        `known` has the marks of such contents by tenant.
        """
        block = self._entries.get(block_hash)
        held = self.held.get(block) if block is not None else None
        if block is None or held is None or held.priority != PINNED_PRIORITY:
            return
        if block_hash not in self.marks:
            tenant = held.mark.tenant
            mark = known.get(tenant)
            if mark is None:
                mark = known[tenant] = Mark((), tenant, Fate.UNPINNED)
            self.marks[block_hash] = mark
        self._let_go(block)
        self.note_cached(block)

    # ------------------------------------------------------------ within

    def _await(self, block: BlockId, held: Held) -> None:
        """Wait for the end of a held block's first term, and let it be chosen while it is a leaf."""
        if held.priority != PINNED_PRIORITY:  # a pin has no end
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
        self._order.offer_block(block)

    def _drop(self, block: BlockId) -> Held | None:
        held = self.held.pop(block, None)
        if held is not None and held.priority == PINNED_PRIORITY:
            self.pinned_cached -= 1
        elif held is not None and held.priority > _USUAL:
            self._holdings.remove(held.mark.tenant, block)
        return held

    def _note(self, block: BlockId) -> None:
        """Note what became of a popped block's mark; the block before it may be a leaf now."""
        held, block_hash = self._drop(block), self._blocks.hash[block]
        mark = self.marks.pop(block_hash, None) if block_hash is not None else None
        self.evicted = None
        if held is not None:
            self.evicted = Evicted(_fate_of(held.priority), held.priority)
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
            ending = ((block, each) for block, each in self.held.items() if each.priority != PINNED_PRIORITY)
            self._due = [(each.mark.terms[0][1], each.stamp, block) for block, each in ending]
            heapq.heapify(self._due)
        if len(self._late) > most or len(self._early) > most:
            self._late, self._early = [], []
            for block, each in self.held.items():
                if not self._blocks.children[block]:
                    self._offer(block, each)


def _fate_of(priority: int) -> Fate:
    """Return why a held block of this priority was evicted."""
    if priority == PINNED_PRIORITY:
        return Fate.PINNED
    return Fate.RETAINED if priority > _USUAL else Fate.LOWERED
