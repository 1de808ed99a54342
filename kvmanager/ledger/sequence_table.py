"""The sequences of one worker: those that run, those that wait, and what each tenant holds."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple, TypeVar

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import PARTIAL_HASHES, PARTIAL_PARTS
from common.contracts.lease import Reserve
from common.contracts.limits import MAX_WORKER_SEQUENCES
from common.contracts.types import BlockHash, KvGroup, SequenceId, SequencePhase
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.planned_states import PlannedStates


class SequenceTable:
    """Live sequences by id, with running totals so that no report needs a scan.

    `running` counts sequences in RUNNING and `admitted` all that hold a block table. `growth` is the number of blocks
    that running sequences may still bind. `partial` is the last sequence that began with a part of its blocks.
    `stalled` are those that the worker named last: they lack a block. `copying` are those whose copy was not reported,
    the first first, and whether they still hold its source. `tenants` are those with a live sequence. Where the pool
    has `groups`, blocks that are bound or held are counted in pages, and sequences that wait for a checkpoint are in
    `planned`, not in the queue; nor are those in `fetching`, which wait for transfers. `window` is that of a pool of
    which every layer has one.
    """

    __slots__ = (
        "admitted", "block_size", "copying", "fetching", "groups", "growth", "live", "next_arrival", "partial",
        "planned", "preempting", "queue", "running", "stalled", "tenants", "window",
    )  # fmt: skip

    def __init__(self, block_size: int, groups: Items[KvGroup] = (), window: int = 0) -> None:
        self.block_size, self.groups, self.window = block_size, groups, window
        self.live: dict[SequenceId, Sequence] = {}
        self.tenants: dict[str, TenantUse] = {}
        self.queue, self.planned = WaitingQueue(), PlannedStates()
        self.preempting: set[SequenceId] = set()
        self.copying: dict[SequenceId, bool] = {}
        self.fetching: dict[SequenceId, None] = {}
        self.stalled: tuple[SequenceId, ...] = ()
        self.partial: SequenceId | None = None
        self.growth = self.running = self.admitted = self.next_arrival = 0

    def register_sequence(self, reserve: Reserve, arrival: int, queued_at: float) -> Sequence:
        """Add a sequence without a block table. Raises ProtocolViolation when its id or its length is impossible."""
        if reserve.sequence in self.live:
            raise ProtocolViolation(f"sequence {reserve.sequence} was reserved twice")
        if not 0 < reserve.num_tokens <= reserve.max_len:
            raise ProtocolViolation(f"sequence {reserve.sequence} has {reserve.num_tokens} of {reserve.max_len} tokens")
        if len(reserve.block_hashes) > reserve.num_tokens // self.block_size:
            raise ProtocolViolation(
                f"sequence {reserve.sequence} has {len(reserve.block_hashes)} hashes for {reserve.num_tokens} tokens"
            )
        _check_partial_hashes(reserve, self.block_size)
        if len(self.live) >= MAX_WORKER_SEQUENCES:
            raise ProtocolViolation(f"the worker has more than {MAX_WORKER_SEQUENCES} sequences at once")
        sequence = Sequence(reserve, arrival, self.block_size, queued_at, self.groups, self.window)
        self.next_arrival = max(self.next_arrival, arrival + 1)
        self.live[sequence.id] = sequence
        if sequence.retention and sequence.fork_of in self.live:
            self.live[sequence.fork_of].forks.add(sequence.id)
        use = self.tenants.get(sequence.tenant) or TenantUse(sequence.weight)
        self.tenants[sequence.tenant] = use._replace(weight=sequence.weight, live=use.live + 1)
        return sequence

    def forget_sequence(self, sequence: Sequence) -> None:
        """Remove a live sequence, whose block table was released or never granted."""
        del self.live[sequence.id]
        self._forget_fork(sequence)
        use = self.tenants[sequence.tenant]
        if use.live > 1:
            self.tenants[sequence.tenant] = use._replace(live=use.live - 1)
        else:
            del self.tenants[sequence.tenant]

    def _forget_fork(self, sequence: Sequence) -> None:
        if sequence.fork_of is not None and (parent := self.live.get(sequence.fork_of)) is not None:
            parent.forks.discard(sequence.id)

    def leave_blocks_to_forks(self, sequence: Sequence) -> None:
        """Let the forks that wait count as their own what a sequence counted so, because it leaves its blocks."""
        for fork in map(self.live.get, sequence.forks):
            if fork is not None and fork.fork_of == sequence.id:
                fork.own_from = min(fork.own_from, sequence.own_from)
        sequence.forks.clear()

    def start_sequence(self, sequence: Sequence, step: int, phase: SequencePhase = SequencePhase.RUNNING) -> None:
        """Count a sequence whose block table is complete, as of this step of the worker."""
        sequence.phase, sequence.started_at = phase, step
        self._forget_fork(sequence)
        self.admitted += 1
        if phase is SequencePhase.RUNNING:
            self.running += 1
            self.growth += sequence.growth
            self.count_tenant_use(sequence, 1, sequence.own_blocks)
        elif phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def halt_sequence(self, sequence: Sequence, phase: SequencePhase) -> None:
        """Stop counting a sequence as running; it keeps its block table until a report releases that."""
        if sequence.phase is SequencePhase.RUNNING:
            self.running -= 1
            self.growth -= sequence.growth
            self.count_tenant_use(sequence, -1, -sequence.own_blocks)
        sequence.phase = phase
        if phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    @property
    def waiting(self) -> int:
        """Sequences without a block table."""
        return len(self.queue) + len(self.planned.awaited) + len(self.fetching)

    def end_planned(self, state: BlockHash, owner: SequenceId | None = None) -> None:
        """Forget a planned checkpoint, as `PlannedStates.end` does, and queue those again that have waited for it."""
        for each in self.planned.end(state, owner):
            self.queue.add_sequence(self.live[each])

    def count_tenant_use(self, sequence: Sequence, running: int, blocks: int) -> None:
        """Count what a tenant's running sequences hold more than before."""
        self.tenants[sequence.tenant] = self.tenants[sequence.tenant].more(running, blocks)

    # ------------------------------------------------------------ questions

    def find_begun_prompt(self) -> Sequence | None:
        """Return the sequence that runs with a part of its prompt's blocks; there is at most one."""
        if self.partial is None or not self._runs(self.partial):
            return None
        sequence = self.live[self.partial]
        return sequence if sequence.lacking(self.block_size) else None

    def find_stalled(self) -> list[SequenceId]:
        """Return the stalled sequences that still run; one that left must not block admission.

        A prompt that was granted in part is none of them: it waits for blocks as the next sequence does.
        """
        if not self.stalled:
            return []
        part = self.find_begun_prompt()
        return [each for each in self.stalled if self._runs(each) and (part is None or each != part.id)]

    def _runs(self, sequence_id: SequenceId) -> bool:
        sequence = self.live.get(sequence_id)
        return sequence is not None and sequence.phase is SequencePhase.RUNNING


def _check_partial_hashes(reserve: Reserve, size: int) -> None:
    count = len(reserve.partial_hashes)
    if count > PARTIAL_HASHES * (reserve.num_tokens // size + 1) or (count and size % PARTIAL_PARTS):
        what = f"{count} partial hashes for {reserve.num_tokens} tokens in blocks of {size}"
        raise ProtocolViolation(f"sequence {reserve.sequence} has {what}; expected {PARTIAL_HASHES} a block")


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


_Place = tuple[int, int, SequenceId]
_Arrival = tuple[int, SequenceId]
Key = TypeVar("Key", _Place, _Arrival)


# Sequences that wait for blocks: a line for each tenant, the highest priority first in it, then by arrival.
# The grant order chooses among the heads of the lines. `backfill.py` says who may pass one that does not fit.
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

    def add_sequence(self, sequence: Sequence) -> None:
        bisect.insort(self._lines.setdefault(sequence.tenant, []), _place(sequence))
        bisect.insort(self._arrivals.setdefault(sequence.tenant, []), _arrival(sequence))
        self.unexplained[sequence.id] = None
        sequence.outranked = self._admitted_above(sequence.priority)

    def remove_sequence(self, sequence: Sequence) -> None:
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
