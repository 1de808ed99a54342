"""The data of one worker's ledger, and the elementary changes that keep its running totals right.

Rules decide which change happens when: `report_applier`, `block_granter`, `evicting`, `preemption` and `rebuild`.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from common.contracts.clock import Clock
from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import PARTIAL_HASHES, PARTIAL_PARTS
from common.contracts.lease import Reserve, blocks_needed
from common.contracts.limits import MAX_WORKER_SEQUENCES
from common.contracts.types import BlockHash, BlockId, Candidate, Decision, DecisionKind, SequenceId, SequencePhase
from kvmanager.cache.block_pool import BlockPool
from kvmanager.cache.eviction.choice import order_of
from kvmanager.cache.eviction.interface import NO_MARK
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.cache.remembered_match import RememberedMatch
from kvmanager.cache.retention import Retention
from kvmanager.cache.window_match import deciding_hashes
from kvmanager.contracts.block import CACHED, ROOT, Blocks
from kvmanager.contracts.counts import Totals
from kvmanager.contracts.index_events import Stored
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.backfill import Reservation

# Decision records: the manager's choices, their candidates and reasons. The caller provides ids and time.


Figures = dict[str, float]


class DecisionLog:
    """Makes records about one worker and keeps them until they are drained."""

    __slots__ = ("_clock", "_ids", "_records", "_worker")

    def __init__(self, clock: Clock, ids: Callable[[], str], worker: str = "") -> None:
        self._clock = clock
        self._ids = ids
        self._worker = worker
        self._records: list[Decision] = []

    def record(
        self,
        kind: DecisionKind,
        chosen: str,
        subject: Sequence | None,
        reasons: tuple[str, ...],
        figures: Figures,
        candidates: tuple[Candidate, ...] = (),
        beneficiary: str = "",
    ) -> str:
        """Add a record about `subject` (None: the worker as a whole) and return its id.

        The beneficiary of an eviction is its subject.
        """
        return self._add(
            Decision(
                self._ids(), kind, self._clock.time_ns(), chosen, subject.request_id if subject else "", candidates,
                reasons, figures=tuple(figures.items()), traceparent=subject.traceparent if subject else "",
                beneficiary=subject.name if subject and kind is DecisionKind.EVICTION else beneficiary,
                worker=self._worker,
            )
        )  # fmt: skip

    def preempted(
        self,
        victim: Sequence,
        beneficiary: Sequence | None,
        reasons: tuple[str, ...],
        figures: Figures,
        candidates: tuple[Candidate, ...],
    ) -> str:
        return self._add(
            Decision(
                self._ids(), DecisionKind.PREEMPTION, self._clock.time_ns(), victim.name, victim.request_id, candidates,
                reasons, victim=victim.name, beneficiary=beneficiary.name if beneficiary else "",
                figures=tuple(figures.items()), traceparent=victim.traceparent, worker=self._worker,
            )
        )  # fmt: skip

    def _add(self, decision: Decision) -> str:
        self._records.append(decision)
        return decision.decision_id

    def drain(self) -> tuple[Decision, ...]:
        """Return the records since the last call."""
        records, self._records = tuple(self._records), []
        return records


# The reset of a prefix cache as the worker is to carry it out: ordered, sent, confirmed.
# The manager forgets at once. The worker still claims the content, and an inventory would bring it back. So the id
# of a reset is a level: the worker confirms it, keeps it and names it at each attach. A worker that names another
# id than the manager's latest is reset again.


@dataclass(slots=True)
class ResetOrder:
    """Ids of resets in one session; 0 is none."""

    wanted: int = 0
    sent: int = 0
    confirmed: int = 0

    @property
    def pending(self) -> bool:
        """Whether the worker has still to confirm the latest reset."""
        return self.wanted != self.confirmed

    def take(self) -> int:
        """Return the id for the next batch; 0 when it was sent already."""
        if self.sent == self.wanted:
            return 0
        self.sent = self.wanted
        return self.sent

    def key(self) -> tuple[int, int, int]:
        return self.wanted, self.sent, self.confirmed


# Sequences that wait for blocks: a line for each tenant, the highest priority first in it, then by arrival.
# The grant policy chooses among the heads of the lines. `backfill.py` says who may pass one that does not fit.


_Place = tuple[int, int, SequenceId]
_Arrival = tuple[int, SequenceId]
Key = TypeVar("Key", _Place, _Arrival)


class WaitingQueue:
    """Sorted lines. A sequence keeps its arrival for life, so a preempted sequence returns to its old place.

    `unexplained` are those whose wait has no decision record yet, in the order in which they joined. `admissions`
    counts those that got their blocks, by priority.
    """

    __slots__ = ("_arrivals", "_lines", "admissions", "unexplained")

    def __init__(self) -> None:
        self._lines: dict[str, list[_Place]] = {}
        self._arrivals: dict[str, list[_Arrival]] = {}
        self.unexplained: dict[SequenceId, None] = {}
        self.admissions: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[SequenceId]:
        return (place[2] for place in heapq.merge(*self._lines.values()))

    def heads(self) -> list[SequenceId]:
        """Return the first sequence of each tenant, of those with the highest priority of all that wait."""
        firsts = [line[0] for line in self._lines.values()]
        if len(firsts) < 2:
            return [first[2] for first in firsts]
        highest = min(first[0] for first in firsts)
        return [first[2] for first in firsts if first[0] == highest]

    def by_arrival(self) -> list[Iterator[SequenceId]]:
        """Return the sequences of each tenant in the order of their arrival, whatever their priorities."""
        return [(place[1] for place in line) for line in self._arrivals.values()]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._lines.setdefault(sequence.tenant, []), _place(sequence))
        bisect.insort(self._arrivals.setdefault(sequence.tenant, []), _arrival(sequence))
        self.unexplained[sequence.id] = None
        sequence.outranked = self._admitted_above(sequence.priority)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Raises ValueError when it does not wait."""
        _remove(self._lines, sequence, _place(sequence))
        _remove(self._arrivals, sequence, _arrival(sequence))
        self.unexplained.pop(sequence.id, None)

    def count_admission(self, sequence: Sequence) -> int:
        """Count the admission of a sequence; return how many of a higher priority came before since it joined."""
        self.admissions[sequence.priority] += 1
        return self._admitted_above(sequence.priority) - sequence.outranked

    def _admitted_above(self, priority: int) -> int:
        return sum(count for each, count in self.admissions.items() if each > priority)


def _remove(lines: dict[str, list[Key]], sequence: Sequence, key: Key) -> None:
    line = lines.get(sequence.tenant, [])
    index = bisect.bisect_left(line, key)
    if index == len(line) or line[index] != key:
        raise ValueError(f"{sequence.name} does not wait")
    del line[index]
    if not line:
        del lines[sequence.tenant]


def _place(sequence: Sequence) -> _Place:
    return (-sequence.priority, sequence.arrival, sequence.id)


def _arrival(sequence: Sequence) -> _Arrival:
    return (sequence.arrival, sequence.id)


BlockedBy = Literal["", "capacity", "places", "prompt", "deferred", "batch"]
"""Why the next sequence was not admitted: too few blocks, no place, a prompt that lacks blocks comes first, a stall or
a preemption does, or the batch has enough admissions."""

NEVER_SENT = None
"""Last sent lease target of a worker that has received none since its attach: the next batch is always sent."""


class TenantUse(NamedTuple):
    """What the sequences of a tenant hold: how many live, how many of these run, and the own blocks of the latter.

    The weight is that of the first of them. Values are never changed in place, so that a copy of the dict is a copy.
    """

    weight: float
    live: int = 0
    running: int = 0
    blocks: int = 0

    def more(self, running: int, blocks: int) -> TenantUse:
        return TenantUse(self.weight, self.live, self.running + running, self.blocks + blocks)


class LedgerState:
    """Blocks, sequences, queue and prefix cache of one worker, with running totals so that no report needs a scan.

    `running` counts sequences in RUNNING and `admitted` all that hold a block table. `growth` is the number of blocks
    that running sequences may still bind. `admitted_in_turn` counts admissions since the last one by age, and `steps`
    the worker's steps since the session began. `partial` is the last sequence that began with a part of its blocks.
    `last_sent_target` is the lease target that the worker received last.
    """

    __slots__ = (
        "admitted", "admitted_in_turn", "block_pool", "blocked_by", "blocks", "cache", "caches", "clock", "config",
        "copying", "decisions", "eviction", "growth", "last_sent_target", "last_step", "lease_want", "next_arrival",
        "partial", "preempting", "queue", "refused", "remembered", "reservation", "resets", "retention", "running",
        "sequences", "stalled", "steps", "tenants", "totals",
    )  # fmt: skip

    def __init__(self, config: LedgerConfig, clock: Clock, decision_ids: Callable[[], str], worker: str = "") -> None:
        self.config, self.caches = config, config.caches
        self.clock = clock
        self.decisions = DecisionLog(clock, decision_ids, worker)
        self.totals = Totals()
        self.blocks = Blocks(config.num_blocks)
        linked = not config.window
        self.cache = PrefixCache(self.blocks, config.ghosts or 4 * config.num_blocks, linked)
        self.eviction = order_of(config.eviction, self.blocks, self.cache.entries, linked)
        self.retention = Retention(self.blocks, self.cache.entries, self.eviction, clock, config.retention_limits)
        self.empty()

    def empty(self) -> None:
        """Forget sequences and levels and free every block; event numbers, ghosts and totals go on."""
        self.eviction.empty()
        self.retention.clear()
        self.blocks.clear()
        self.block_pool = BlockPool(self.blocks, self.eviction, self.retention)
        self.cache.rebase()
        self.sequences: dict[SequenceId, Sequence] = {}
        # Those with a live sequence.
        self.tenants: dict[str, TenantUse] = {}
        self.queue = WaitingQueue()
        self.preempting: set[SequenceId] = set()
        # Those whose copy was not reported, the first first, and whether they still hold its source.
        self.copying: dict[SequenceId, bool] = {}
        self.stalled: tuple[SequenceId, ...] = ()
        self.refused: list[SequenceId] = []
        self.last_sent_target: int | None = NEVER_SENT
        self.lease_want = 0
        self.resets = ResetOrder()
        self.remembered: RememberedMatch | None = None
        self.growth = self.running = self.admitted = self.next_arrival = self.admitted_in_turn = 0
        self.blocked_by: BlockedBy = ""
        self.steps = 0
        self.last_step: int | None = None
        self.reservation: Reservation | None = None
        self.partial: SequenceId | None = None

    # ------------------------------------------------------------ sequences

    def register(self, reserve: Reserve, arrival: int) -> Sequence:
        """Add a sequence without a block table. Raises ProtocolViolation when its id or its length is impossible."""
        if reserve.sequence in self.sequences:
            raise ProtocolViolation(f"sequence {reserve.sequence} was reserved twice")
        if not 0 < reserve.num_tokens <= reserve.max_len:
            raise ProtocolViolation(f"sequence {reserve.sequence} has {reserve.num_tokens} of {reserve.max_len} tokens")
        if len(reserve.block_hashes) > reserve.num_tokens // self.config.block_size:
            raise ProtocolViolation(
                f"sequence {reserve.sequence} has {len(reserve.block_hashes)} hashes for {reserve.num_tokens} tokens"
            )
        self._check_partial_hashes(reserve)
        if len(self.sequences) >= MAX_WORKER_SEQUENCES:
            raise ProtocolViolation(f"the worker has more than {MAX_WORKER_SEQUENCES} sequences at once")
        sequence = Sequence(reserve, arrival, self.config.block_size, self.clock.monotonic())
        self.next_arrival = max(self.next_arrival, arrival + 1)
        self.sequences[sequence.id] = sequence
        if sequence.retention and sequence.fork_of in self.sequences:
            self.sequences[sequence.fork_of].forks.add(sequence.id)
        use = self.tenants.get(sequence.tenant) or TenantUse(sequence.weight)
        self.tenants[sequence.tenant] = use._replace(weight=sequence.weight, live=use.live + 1)
        return sequence

    def _check_partial_hashes(self, reserve: Reserve) -> None:
        count, size = len(reserve.partial_hashes), self.config.block_size
        if count > PARTIAL_HASHES * (reserve.num_tokens // size + 1) or (count and size % PARTIAL_PARTS):
            what = f"{count} partial hashes for {reserve.num_tokens} tokens in blocks of {size}"
            raise ProtocolViolation(f"sequence {reserve.sequence} has {what}; expected {PARTIAL_HASHES} a block")

    def forget(self, sequence: Sequence) -> None:
        """Remove a live sequence, whose block table was released or never granted."""
        del self.sequences[sequence.id]
        self._forget_fork(sequence)
        use = self.tenants[sequence.tenant]
        if use.live > 1:
            self.tenants[sequence.tenant] = use._replace(live=use.live - 1)
        else:
            del self.tenants[sequence.tenant]

    def _forget_fork(self, sequence: Sequence) -> None:
        if sequence.fork_of is not None and (parent := self.sequences.get(sequence.fork_of)) is not None:
            parent.forks.discard(sequence.id)

    def leave_to_forks(self, sequence: Sequence) -> None:
        """Let the forks that wait count as their own what a sequence counted so, because it leaves its blocks."""
        for fork in map(self.sequences.get, sequence.forks):
            if fork is not None and fork.fork_of == sequence.id:
                fork.own_from = min(fork.own_from, sequence.own_from)
        sequence.forks.clear()

    def queue_or_refuse(self, sequence: Sequence) -> None:
        """Queue a sequence. Refuse it for good when the whole pool could not hold it; those behind it proceed."""
        config = self.config
        needed = blocks_needed(sequence.num_tokens, sequence.max_len, config.block_size, config.window)
        there = config.num_blocks
        if needed <= there:
            self.queue.add(sequence)
            return
        self.forget(sequence)
        self.refused.append(sequence.id)
        self.totals.rejections += 1
        reason = f"{sequence.max_len} tokens need {needed} blocks; the pool has {there}"
        figures = {"needed_blocks": float(needed), "num_blocks": float(there), "max_len": float(sequence.max_len)}
        self.decisions.record(DecisionKind.REJECTION, "refused", sequence, (reason,), figures)

    def start(self, sequence: Sequence, phase: SequencePhase = SequencePhase.RUNNING) -> None:
        """Count a sequence whose block table is complete."""
        sequence.phase, sequence.started_at = phase, self.steps
        self._forget_fork(sequence)
        self.admitted += 1
        if phase is SequencePhase.RUNNING:
            self.running += 1
            self.growth += sequence.growth
            self.count_use(sequence, 1, sequence.own_blocks)
        elif phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def halt(self, sequence: Sequence, phase: SequencePhase) -> None:
        """Stop counting a sequence as running; it keeps its block table until a report releases that."""
        if sequence.phase is SequencePhase.RUNNING:
            self.running -= 1
            self.growth -= sequence.growth
            self.count_use(sequence, -1, -sequence.own_blocks)
        sequence.phase = phase
        if phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def count_steps(self, step: int) -> None:
        """Count the worker's steps up to the one that a report names."""
        if self.last_step is not None:
            self.steps += max(0, step - self.last_step)
        self.last_step = step

    def count_use(self, sequence: Sequence, running: int, blocks: int) -> None:
        """Count what a tenant's running sequences hold more than before."""
        self.tenants[sequence.tenant] = self.tenants[sequence.tenant].more(running, blocks)

    def partly_granted(self) -> Sequence | None:
        """Return the sequence that runs with a part of its prompt's blocks; there is at most one."""
        if self.partial is None or not self._runs(self.partial):
            return None
        sequence = self.sequences[self.partial]
        return sequence if sequence.lacking(self.config.block_size) else None

    def live_stalled(self) -> list[SequenceId]:
        """Return the stalled sequences that still run; one that left must not block admission.

        A prompt that was granted in part is none of them: it waits for blocks as the next sequence does.
        """
        if not self.stalled:
            return []
        part = self.partly_granted()
        return [each for each in self.stalled if self._runs(each) and (part is None or each != part.id)]

    def _runs(self, sequence_id: SequenceId) -> bool:
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.phase is SequencePhase.RUNNING

    # ------------------------------------------------------------ remembered matches

    def recall(self, sequence: Sequence) -> RememberedMatch | None:
        """Return the match of a sequence from an earlier attempt to admit it, if that still holds."""
        found = self.remembered
        if found is None or found.sequence != sequence.id or found.num_tokens != sequence.num_tokens:
            return None
        return found if self.cache.watched else None

    def remember(self, sequence: Sequence, found: RememberedMatch) -> None:
        """Keep the match of a sequence that cannot be admitted now."""
        self.remembered = found
        hashes, looked_at = sequence.block_hashes, set[BlockHash]()
        if self.config.window:
            looked_at = deciding_hashes(self.cache, self.config, hashes, sequence.num_tokens, found.match)
        else:
            looked_at.update(hashes[: len(found.hits) + 1])
        self.cache.watched = frozenset(looked_at)

    # ------------------------------------------------------------ blocks

    def append_block(self, block: BlockId, sequence: Sequence) -> None:
        """Append a block without content to a block table. Others may share it at once if its hash is known.

        The block of the last known token is not shared. If a sharer filled that slot first, the sequence could never
        compute its logits, because a slot is written once. So it is with all blocks of one that computes all tokens.
        """
        blocks, table, block_hashes = self.blocks, sequence.block_table, sequence.block_hashes
        index, known = len(table), len(block_hashes)
        # What `describe` does.
        blocks.index[block], blocks.owner[block] = index, sequence.id
        blocks.parent[block] = ROOT if not index else block_hashes[index - 1] if index <= known else None
        table.append(block)
        if index < known:
            self.expect(block, sequence, index)

    def append_fresh(self, count: int, sequence: Sequence) -> None:
        """Do what `append_block` does with the next free blocks. Raises IndexError when there are too few."""
        blocks, take, table = self.blocks, self.block_pool.take, sequence.block_table
        index_of, owner_of, parent_of = blocks.index, blocks.owner, blocks.parent
        block_hashes, number = sequence.block_hashes, sequence.id
        first, known = len(table), len(block_hashes)
        shared = min(known, self.config.hits_of(sequence.num_tokens)) if self._shares_early(sequence) else 0
        for index in range(first, first + count):
            block = take()
            index_of[block], owner_of[block] = index, number
            parent_of[block] = ROOT if not index else block_hashes[index - 1] if index <= known else None
            table.append(block)
            if index < shared:
                self.cache.expect(block, block_hashes[index])

    def expect(self, block: BlockId, sequence: Sequence, index: int) -> None:
        """Let others share a block that the sequence is about to fill, where its hash is known."""
        if index >= len(sequence.block_hashes) or not self._shares_early(sequence):
            return
        if index < self.config.hits_of(sequence.num_tokens):
            self.cache.expect(block, sequence.block_hashes[index])

    def _shares_early(self, sequence: Sequence) -> bool:
        """Return whether others may share blocks that the sequence has not filled yet."""
        return self.caches and not sequence.computes_all

    def may_publish(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Return whether a block in use may be registered: after its parent, at its own depth, under a hash of its own.

        A block whose hash another content has, or had, is not shared, and nothing after it. With a window, the parent
        may be gone.
        """
        cache = self.cache
        if not self.caches or parent in cache.ambiguous or not self.follows(block, parent):
            return False
        known = block_hash in cache.entries or cache.ambiguous
        if known and cache.is_ambiguous(block_hash, parent, self.blocks.index[block]):
            cache.forget_pending(block)
            return False
        return True

    def follows(self, block: BlockId, parent: BlockHash) -> bool:
        """Return whether a block of a block table is its first, or the block before it there holds `parent`.

        A block of another sequence with that hash does not count: it may be evicted while this one is in use. With a
        window a parent may be evicted before its child, and a child is registered without it.
        """
        index, owner = self.blocks.index[block], self.sequences.get(self.blocks.owner[block])
        if not parent or not index:
            return not parent and not index
        if self.config.window:
            return True
        table = owner.block_table if owner is not None else []
        if index >= len(table) or table[index] != block:
            # The sequence that was to fill it has left; one of those that shared it has filled it.
            tables = (each.block_table for each in self.sequences.values())
            table = next((each for each in tables if index < len(each) and each[index] == block), [])
        return bool(table) and self.blocks.hash[table[index - 1]] == parent

    def publish_new(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Do what `publish` does with a hash that no block has: nearly each seal is one."""
        cache, blocks, above = self.cache, self.blocks, None
        if blocks.pending[block] is not None:
            cache.forget_pending(block)
        if cache.watched:
            cache.touch(block_hash)
        blocks.hash[block], blocks.parent[block] = block_hash, parent
        if parent and not self.config.window:
            above = cache.entries[parent]
            blocks.children[above] += 1
        elif parent:
            above = cache.entries.get(parent)
        cache.entries[block_hash] = block
        cache.number += 1
        cache.events.append(Stored(cache.number, block_hash, blocks.index[block]))
        ghost = cache.ghosts.pop(block_hash, None)
        self.eviction.registered(block, above, ghost[2:] if ghost else NO_MARK)
        if block in blocks.awaited:
            self._count_awaited(block)

    def publish(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Register a block in use. A cached copy of its content is free from now on."""
        cache, pool, entries = self.cache, self.block_pool, self.cache.entries
        ghost = cache.register(block, block_hash, parent)
        pool.cached.registered(block, entries.get(parent), ghost[2:] if ghost else NO_MARK)
        if block in self.blocks.awaited:
            self._count_awaited(block)
        first = entries[block_hash]
        if first != block and self.blocks.state[first] is CACHED:
            cache.evict(first)
            pool.replace_cached(first, block)

    def release(self, released: Iterable[BlockId]) -> None:
        """Drop a reference to each block. Of several with one content, the one that is released last stays cached.

        The others are in use then and come later in the order of eviction, so a parent still outlives its children.
        """
        blocks, cache, pool, copies = self.blocks, self.cache, self.block_pool, self.cache.copies
        refs, hash_of, pending = blocks.refs, blocks.hash, blocks.pending
        for block in released:
            block_hash = hash_of[block]
            if block_hash is not None and refs[block] == 1:
                if cache.watched:
                    cache.touch(block_hash)
                if block_hash in copies:
                    cache.evict(block)
            if pool.drop(block):
                if pending[block] is not None:
                    cache.forget_pending(block)
                blocks.awaited.pop(block, None)

    def hold_source(self, sequence: Sequence, block: BlockId) -> None:
        """Hold the source of a sequence's copy."""
        self.block_pool.hold(block)
        sequence.copy_source = block
        self.copying[sequence.id] = True

    def release_source(self, sequence: Sequence) -> None:
        """Stop holding the source of a sequence's copy, if it holds one."""
        source, sequence.copy_source = sequence.copy_source, None
        self.copying.pop(sequence.id, None)
        if source is not None:
            self.release((source,))

    def give_up_sources(self) -> bool:
        """Stop holding the sources of all copies, because blocks are short; return whether there were any.

        The copies stay right: the worker has their orders, and every later write of a source stands behind them.
        """
        given_up = [each for each, held in self.copying.items() if held]
        for each in given_up:
            self.release_source(self.sequences[each])
        self.copying.update(dict.fromkeys(given_up, False))
        return bool(given_up)

    def _count_awaited(self, block: BlockId) -> None:
        """Count hits on a block that was not sealed when they were granted.

        Where the sequence that was to fill it has left, one of those that shared the block has filled it.
        """
        owner, index = self.sequences.get(self.blocks.owner[block]), self.blocks.index[block]
        table = owner.block_table if owner is not None else ()
        filled = index < len(table) and table[index] == block
        self.totals.prefix_hit_blocks += self.blocks.awaited.pop(block) - (not filled)

    def describe(self, block: BlockId, sequence: Sequence, index: int) -> None:
        """Set the index, owner and parent hash of a block, as far as the sequence's block hashes are known."""
        blocks, block_hashes = self.blocks, sequence.block_hashes
        blocks.index[block], blocks.owner[block] = index, sequence.id
        blocks.parent[block] = ROOT if not index else block_hashes[index - 1] if index <= len(block_hashes) else None

    def parent_of(self, block: BlockId) -> BlockHash | None:
        """Return the hash of the block before this one (ROOT for a first block); None while it is not known."""
        parent, index = self.blocks.parent[block], self.blocks.index[block]
        if parent is not None:
            return parent
        owner = self.sequences.get(self.blocks.owner[block])
        if owner is None or index > len(owner.block_hashes):
            return None
        return owner.block_hashes[index - 1]
