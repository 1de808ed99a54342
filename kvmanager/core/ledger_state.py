"""The data of one worker's ledger, and the elementary changes that keep its running totals right.

The policies of `policies.py` decide which change happens when; each of them takes a `LedgerState`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from common.clock import Clock
from common.errors import ProtocolViolation
from common.lease import Reserve
from common.types import BlockHash, DecisionKind, SequenceId, SequencePhase
from kvmanager.core.block import ROOT, Block
from kvmanager.core.block_pool import BlockPool
from kvmanager.core.config import LedgerConfig
from kvmanager.core.counts import Totals
from kvmanager.core.decisions import DecisionLog
from kvmanager.core.prefix_cache import PrefixCache
from kvmanager.core.sequence import Sequence
from kvmanager.core.waiting_queue import WaitingQueue

BlockedBy = Literal["", "capacity", "deferred"]
"""Why the head of the queue was not admitted: too few blocks, or a limit, a stall or a preemption came first."""

NEVER_SENT = None
"""Last sent lease target of a worker that has received none since its attach: the next batch is always sent."""


class LedgerState:
    """Blocks, sequences, queue and prefix cache of one worker, with running totals so that no report needs a scan.

    `running` counts sequences in RUNNING and `admitted` all that hold a block table. `growth` is the number of blocks
    that running sequences may still bind. `last_sent_target` is the lease target that the worker received last.
    """

    __slots__ = (
        "admitted", "block_pool", "blocked_by", "cache", "clock", "config", "decisions", "growth", "last_sent_target",
        "lease_want", "next_arrival", "preempting", "queue", "refused", "running", "sequences", "stalled", "totals",
    )  # fmt: skip

    def __init__(self, config: LedgerConfig, clock: Clock, decision_ids: Callable[[], str]) -> None:
        self.config = config
        self.clock = clock
        self.decisions = DecisionLog(clock, decision_ids)
        self.totals = Totals()
        self.cache = PrefixCache([], config.ghosts or 4 * config.num_blocks)
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
        self.last_sent_target: int | None = NEVER_SENT
        self.lease_want = 0
        self.growth = self.running = self.admitted = self.next_arrival = 0
        self.blocked_by: BlockedBy = ""

    # ------------------------------------------------------------ sequences

    def register(self, reserve: Reserve, arrival: int) -> Sequence:
        """Add a sequence without a block table. Raises ProtocolViolation when its id or its length is impossible."""
        if reserve.sequence in self.sequences:
            raise ProtocolViolation(f"sequence {reserve.sequence} was reserved twice")
        if not 0 < reserve.num_tokens <= reserve.max_len:
            raise ProtocolViolation(f"sequence {reserve.sequence} has {reserve.num_tokens} of {reserve.max_len} tokens")
        sequence = Sequence(reserve, arrival, self.config.block_size, self.clock.monotonic())
        self.next_arrival = max(self.next_arrival, arrival + 1)
        self.sequences[sequence.id] = sequence
        return sequence

    def queue_or_refuse(self, sequence: Sequence) -> None:
        """Queue a sequence. Refuse it for good when the whole pool could not hold it; those behind it proceed."""
        needed, there = sequence.max_blocks, self.config.num_blocks
        if needed <= there:
            self.queue.add(sequence)
            return
        del self.sequences[sequence.id]
        self.refused.append(sequence.id)
        self.totals.rejections += 1
        reason = f"{sequence.max_len} tokens need {needed} blocks; the pool has {there}"
        figures = {"needed_blocks": float(needed), "num_blocks": float(there), "max_len": float(sequence.max_len)}
        self.decisions.record(DecisionKind.REJECTION, "refused", sequence, (reason,), figures)

    def start(self, sequence: Sequence, phase: SequencePhase = SequencePhase.RUNNING) -> None:
        """Count a sequence whose block table is complete."""
        sequence.phase = phase
        self.admitted += 1
        if phase is SequencePhase.RUNNING:
            self.running += 1
            self.growth += sequence.growth
        elif phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def halt(self, sequence: Sequence, phase: SequencePhase) -> None:
        """Stop counting a sequence as running; it keeps its block table until a report releases that."""
        if sequence.phase is SequencePhase.RUNNING:
            self.running -= 1
            self.growth -= sequence.growth
        sequence.phase = phase
        if phase is SequencePhase.DRAINING_PREEMPT:
            self.preempting.add(sequence.id)

    def live_stalled(self) -> list[SequenceId]:
        """Return the stalled sequences that still run; one that left must not block admission."""
        return [each for each in self.stalled if self._runs(each)]

    def _runs(self, sequence_id: SequenceId) -> bool:
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.phase is SequencePhase.RUNNING

    # ------------------------------------------------------------ blocks

    def append_block(self, block: Block, sequence: Sequence) -> None:
        """Append a block without content to a block table. Others may share it at once if its hash is known.

        The block of the last known token is not shared. If a sharer filled that slot first, the sequence could never
        compute its logits, because a slot is written once.
        """
        index, block_hashes = len(sequence.block_table), sequence.block_hashes
        self.describe(block, sequence, index)
        sequence.block_table.append(block.id)
        if index < len(block_hashes) and index < self.config.hits_of(sequence.num_tokens) and self.config.caches:
            self.cache.expect(block, block_hashes[index])

    def describe(self, block: Block, sequence: Sequence, index: int) -> None:
        """Set the index, owner and parent hash of a block, as far as the sequence's block hashes are known."""
        block.index, block.owner = index, sequence.id
        block.parent = (
            ROOT if not index else sequence.block_hashes[index - 1] if index <= len(sequence.block_hashes) else None
        )

    def parent_of(self, block: Block) -> BlockHash | None:
        """Return the hash of the block before this one (ROOT for a first block); None while it is not known."""
        if block.parent is not None:
            return block.parent
        owner = self.sequences.get(block.owner)
        if owner is None or block.index > len(owner.block_hashes):
            return None
        return owner.block_hashes[block.index - 1]
