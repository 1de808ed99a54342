"""The state of one worker's ledger and the elementary changes to it; `ledger.py` has the rules that order them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

from common.clock import Clock
from common.errors import ProtocolViolation
from common.lease import Reserve
from common.types import TRIMMED, BlockHash, BlockId, Candidate, DecisionKind, SequenceId, SequencePhase
from kvmanager.core.block import ROOT, Block, BlockState
from kvmanager.core.block_pool import BlockPool
from kvmanager.core.config import LedgerConfig
from kvmanager.core.counts import Totals
from kvmanager.core.decisions import DecisionLog
from kvmanager.core.eviction import Restored, order_after_rebuild
from kvmanager.core.prefix_cache import PrefixCache
from kvmanager.core.sequence import Sequence
from kvmanager.core.waiting_queue import WaitingQueue

_NAMED = 8
"""Evicted blocks that a record names; the figures have the number of all."""

Hold = Literal["", "capacity", "deferred"]
"""Why the head of the queue was not admitted: too few blocks, or it was not its turn (limits, stalls, preemptions)."""

NEVER_TOLD = None
"""Lease target of a worker that has not been told one since its attach: the next batch is sent whatever it says."""


class Books:
    """Blocks, sequences, queue and prefix cache of one worker, with running totals so that no report needs a scan.

    `running` counts sequences in RUNNING, `rows` all that hold a row, `growth` the blocks that the running may still
    bind, and `told` is the lease target that the worker knows.
    """

    __slots__ = (
        "block_pool", "cache", "clock", "config", "decisions", "growth", "held", "lease_want", "next_arrival",
        "preempting", "queue", "refused", "rows", "running", "sequences", "stalled", "told", "totals",
    )  # fmt: skip

    cache_type: type[PrefixCache] = PrefixCache

    def __init__(self, config: LedgerConfig, clock: Clock, decision_ids: Callable[[], str]) -> None:
        self.config = config
        self.clock = clock
        self.decisions = DecisionLog(clock, decision_ids)
        self.totals = Totals()
        self.cache = self.cache_type([], config.ghosts or 4 * config.num_blocks)
        self.empty()

    def empty(self) -> None:
        """Forget sequences and levels and free every block; event numbers, ghosts and totals go on."""
        self.block_pool = BlockPool(self.config.num_blocks)
        self.cache.rebase(self.block_pool.blocks)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.queue = WaitingQueue()
        self.preempting: set[SequenceId] = set()
        self.stalled: tuple[SequenceId, ...] = ()
        self.refused: list[SequenceId] = []
        self.told: int | None = NEVER_TOLD
        self.lease_want = 0
        self.growth = self.running = self.rows = self.next_arrival = 0
        self.held: Hold = ""

    # ------------------------------------------------------------ sequences

    def enrol(self, reserve: Reserve, arrival: int) -> Sequence:
        """Enter a sequence that has no row yet. Raises ProtocolViolation when its id or its length cannot be."""
        if reserve.sequence in self.sequences:
            raise ProtocolViolation(f"sequence {reserve.sequence} was reserved twice")
        if not 0 < reserve.num_tokens <= reserve.max_len:
            raise ProtocolViolation(f"sequence {reserve.sequence} has {reserve.num_tokens} of {reserve.max_len} tokens")
        sequence = Sequence(reserve, arrival, self.config.block_size, self.clock.monotonic())
        self.next_arrival = max(self.next_arrival, arrival + 1)
        self.sequences[sequence.id] = sequence
        return sequence

    def start(self, sequence: Sequence, phase: SequencePhase = SequencePhase.RUNNING) -> None:
        """Count a sequence whose row is in place."""
        sequence.phase = phase
        self.rows += 1
        if phase is SequencePhase.RUNNING:
            self.running += 1
            self.growth += sequence.growth
        elif phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def halt(self, sequence: Sequence, phase: SequencePhase) -> None:
        """Stop counting a sequence as running; its row stays until a report releases it."""
        if sequence.phase is SequencePhase.RUNNING:
            self.running -= 1
            self.growth -= sequence.growth
        sequence.phase = phase
        if phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def release_row(self, sequence: Sequence) -> None:
        """Drop every reference of a row, tail first, so that children stand before their parents in the LRU order."""
        self.halt(sequence, SequencePhase.WAITING)
        self.preempting.discard(sequence.id)
        self.rows -= 1
        for block in reversed(sequence.block_table):
            if block != TRIMMED:
                self.release(block)
        sequence.block_table = []
        sequence.trimmed = sequence.n_shared = 0

    def live_stalled(self) -> list[SequenceId]:
        """Return the stalled sequences that still run; one that left must not hold admission."""
        return [each for each in self.stalled if self._runs(each)]

    def _runs(self, sequence_id: SequenceId) -> bool:
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.phase is SequencePhase.RUNNING

    # ------------------------------------------------------------ blocks

    def release(self, block_id: BlockId) -> None:
        """Drop one reference of a row."""
        block = self.block_pool.blocks[block_id]
        if self.block_pool.drop(block):
            self.cache.forget_pending(block)

    def evict(self) -> Candidate:
        """Forget the content of the next block in the order of eviction, which is free then; return what it was."""
        block = self.block_pool.uncache()
        depth = self.cache.evict(block)
        self.totals.evictions += 1
        return Candidate(f"block {block.id}", terms=(("depth", float(depth)),))

    def make_free(self, count: int, beneficiary: Sequence | None) -> int:
        """Evict until `count` blocks are free; the caller knows that so many can be. Return how many were evicted."""
        missing = count - len(self.block_pool.free)
        if missing <= 0:
            return 0
        evicted = [self.evict() for _ in range(missing)]
        figures = {"evicted": float(missing), "cached": float(len(self.block_pool.cached)), "wanted": float(count)}
        reasons = ("no block is free", "released longest ago, leaves first")
        named = ", ".join(each.name for each in evicted[:_NAMED]) + (" and more" if missing > _NAMED else "")
        self.decisions.record(DecisionKind.EVICTION, named, beneficiary, reasons, figures, tuple(evicted[:_NAMED]))
        return missing

    def place(self, block: Block, sequence: Sequence) -> None:
        """Append a block without content to a row; others may share it at once if the prompt says what it will hold.

        Not the block of the last known token: if a sharer filled that slot first, the sequence could never compute its
        logits, for a slot is written once.
        """
        index, block_hashes = len(sequence.block_table), sequence.block_hashes
        self.describe(block, sequence, index)
        sequence.block_table.append(block.id)
        if index < len(block_hashes) and index < self.config.hits_of(sequence.num_tokens) and self.config.caches:
            self.cache.expect(block, block_hashes[index])

    def describe(self, block: Block, sequence: Sequence, index: int) -> None:
        """Note where a block stands and what comes before it, as far as the sequence's chain tells."""
        block.index, block.owner = index, sequence.id
        block.parent = (
            ROOT if not index else sequence.block_hashes[index - 1] if index <= len(sequence.block_hashes) else None
        )

    def parent_of(self, block: Block) -> BlockHash | None:
        """Return the hash of the block before this one in its rows (ROOT for a first block); None while not known."""
        if block.parent is not None:
            return block.parent
        owner = self.sequences.get(block.owner)
        if owner is None or block.index > len(owner.block_hashes):
            return None
        return owner.block_hashes[block.index - 1]

    # ------------------------------------------------------------ rules of a rebuild

    def holds_row(self, phase: SequencePhase) -> bool:
        """Return whether a sequence in this phase keeps its row: draining ones do, until their report."""
        return phase is not SequencePhase.WAITING

    def adopts(self, parent: BlockHash) -> bool:
        """Return whether a claim with this parent is believed; without it an ancestor may have been granted again."""
        return self.cache.has_parent(parent)

    def restore_cached(self, restored: list[Restored]) -> None:
        """Fill the order of eviction with the registered blocks that no row holds."""
        for block_id in order_after_rebuild(restored):
            self.block_pool.free.remove(block_id)
            self.block_pool.blocks[block_id].state = BlockState.CACHED
            self.block_pool.cached.append(block_id)

    # ------------------------------------------------------------ copies

    def clone(self) -> Self:
        """Return an independent copy that shares configuration, clock and source of decision ids."""
        new = type(self).__new__(type(self))
        new.config, new.clock, new.decisions = self.config, self.clock, self.decisions.clone()
        new.totals, new.block_pool = self.totals.clone(), self.block_pool.clone()
        new.cache = self.cache.clone(new.block_pool.blocks)
        new.sequences = {key: sequence.clone() for key, sequence in self.sequences.items()}
        new.queue, new.preempting = self.queue.clone(), self.preempting.copy()
        new.stalled, new.refused, new.told = self.stalled, self.refused.copy(), self.told
        new.lease_want, new.growth, new.held = self.lease_want, self.growth, self.held
        new.running, new.rows, new.next_arrival = self.running, self.rows, self.next_arrival
        return new

    def state_key(self) -> tuple[object, ...]:
        """Return everything that later decisions depend on as a hashable value; arrivals count by their order only."""
        by_arrival = sorted(self.sequences.values(), key=lambda sequence: sequence.arrival)
        return (
            tuple(block.key() for block in self.block_pool.blocks),
            tuple(self.block_pool.free),
            tuple(self.block_pool.cached),
            tuple(each.key() for each in by_arrival),
            tuple(self.queue),
            self.stalled,
            tuple(self.refused),
            self.told,
            self.lease_want,
        )
