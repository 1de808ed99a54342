"""Applies a worker's report to the ledger's state, column by column in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Report, Reserve
from common.contracts.types import TRIMMED, BlockHash, BlockId, FinishReason, SequenceId, SequencePhase
from kvmanager.contracts.block import IN_USE
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.ledger_state import LedgerState

_WAITING, _RUNNING = SequencePhase.WAITING, SequencePhase.RUNNING

Column = tuple[Callable[[Report], Any], Callable[[LedgerState, Any], None]]
"""How to read a column of a report, and how to apply its entries."""


class ReportApplier:
    """The rules by which a report changes the ledger. It has no state of its own.

    `columns` gives the order of effects. In another order, a sequence that was preempted and cancelled within one
    report would return to the queue and wait for ever.
    """

    def __init__(self) -> None:
        self.columns: tuple[Column, ...] = (
            (attrgetter("reserve"), self.reserve),
            (attrgetter("bind"), self.bind),
            (attrgetter("seal"), self.seal),
            (attrgetter("partials"), self.index_parts),
            (attrgetter("copied"), self.copied),
            (attrgetter("trim"), self.trim),
            (attrgetter("returned"), self.take_back),
            (attrgetter("preempted"), self.requeue),
            (attrgetter("finished"), self.finish),
        )

    def apply(self, state: LedgerState, report: Report) -> None:
        """Apply a report. Raises ProtocolViolation; the ledger is then void until the next rebuild."""
        state.count_steps(report.step)
        for entries_of, apply_entries in self.columns:
            entries = entries_of(report)
            if entries:
                apply_entries(state, entries)
        if report.stalled is not None:
            self.stall(state, report.stalled)
        state.lease_want = report.lease_want
        state.resets.confirmed = report.reset or state.resets.confirmed
        for sequence_id, length in report.computed:
            if sequence_id in state.sequences:
                state.sequences[sequence_id].computed = length

    # ------------------------------------------------------------ columns

    def reserve(self, state: LedgerState, reserves: Iterable[Reserve]) -> None:
        """Queue sequences in the order of their arrival."""
        for reserve in reserves:
            state.queue_or_refuse(state.register(reserve, state.next_arrival))

    def bind(self, state: LedgerState, bindings: Iterable[tuple[SequenceId, BlockId]]) -> None:
        """Append leased blocks to block tables."""
        bound: dict[str, int] = {}
        find, bind, append = state.sequences.get, state.block_pool.bind, state.append_block
        for sequence_id, block_id in bindings:
            sequence = find(sequence_id)
            if sequence is None or sequence.phase is _WAITING:
                raise ProtocolViolation(
                    f"block {block_id} was bound to sequence {sequence_id}, which has no block table"
                )
            if len(sequence.block_table) >= sequence.max_blocks:
                raise ProtocolViolation(f"sequence {sequence_id} grew beyond {sequence.max_blocks} blocks")
            bind(block_id)
            append(block_id, sequence)
            if sequence.phase is _RUNNING:
                bound[sequence.tenant] = bound.get(sequence.tenant, 0) + 1
        for tenant, count in bound.items():
            state.growth -= count
            state.tenants[tenant] = state.tenants[tenant].more(0, count)

    def seal(self, state: LedgerState, seals: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Register full, computed blocks whose parent is registered; count and ignore the others."""
        blocks, sequences, pending, entries = state.blocks, state.sequences, state.blocks.pending, state.cache.entries
        states, hash_of, parent_of = blocks.state, blocks.hash, blocks.parent
        owner_of, depth_of = blocks.owner, blocks.index
        may_publish, publish_new = state.may_publish, state.publish_new
        for block, block_hash in seals:
            if not 0 <= block < len(states):
                state.block_pool.check(block)
            parent = None
            if states[block] is IN_USE and hash_of[block] is None:
                parent = parent_of[block]
                if parent is None:
                    parent = state.parent_of(block)
            expected = pending[block]
            if parent is None or not may_publish(block, block_hash, parent):
                state.totals.ignored_seals += 1
                continue
            if expected is not None and expected != block_hash:
                raise ProtocolViolation(f"block {block} was sealed with another hash than its prompt's")
            if block_hash in entries:
                state.publish(block, block_hash, parent)
            else:
                publish_new(block, block_hash, parent)
            owner = sequences.get(owner_of[block])
            if owner is not None and depth_of[block] == len(owner.block_hashes):
                owner.block_hashes.append(block_hash)

    def index_parts(self, state: LedgerState, partials: Iterable[tuple[BlockHash, tuple[BlockHash, ...]]]) -> None:
        """Note the partial hashes of sealed blocks; those of a block whose seal was ignored are ignored too."""
        if not state.config.copies_parts:
            return
        entries, hash_of, add = state.cache.entries, state.blocks.hash, state.cache.partials.add
        for block_hash, parts in partials:
            if (block := entries.get(block_hash)) is not None:
                # The object that the map has already: each one from the wire would be kept beside it.
                add(hash_of[block] or block_hash, parts)

    def copied(self, state: LedgerState, sequences: Iterable[SequenceId]) -> None:
        """Stop holding the sources of copies that have run; a sequence that left holds none."""
        for sequence_id in sequences:
            sequence = state.sequences.get(sequence_id)
            if sequence is not None:
                state.release_source(sequence)

    def trim(self, state: LedgerState, trims: Iterable[tuple[SequenceId, int]]) -> None:
        """Release leading blocks that left every layer's window; the block table keeps their places."""
        for sequence_id, count in trims:
            sequence = state.sequences.get(sequence_id)
            if sequence is None:
                continue
            table = sequence.block_table
            if count > len(table):
                raise ProtocolViolation(f"{count} blocks of a block table of {len(table)} were trimmed")
            trimmed = range(sequence.trimmed, count)
            if sequence.retention and state.caches:
                state.retention.mark(sequence, sequence.trimmed, count)
            self.release(state, [table[index] for index in trimmed])
            table[sequence.trimmed : count] = [TRIMMED] * len(trimmed)
            held = sequence.own_blocks
            sequence.trimmed = max(sequence.trimmed, count)
            if sequence.phase is SequencePhase.RUNNING:
                state.count_use(sequence, 0, sequence.own_blocks - held)

    def take_back(self, state: LedgerState, blocks: Iterable[BlockId]) -> None:
        """Free leased blocks that the worker returned."""
        for block_id in blocks:
            state.block_pool.give_back(block_id)

    def requeue(self, state: LedgerState, preempted: Iterable[tuple[SequenceId, int]]) -> None:
        """Release the block tables of preempted sequences and queue the sequences again at their old places."""
        for sequence_id, num_tokens in preempted:
            sequence = state.sequences.get(sequence_id)
            if sequence is None or sequence.phase is SequencePhase.WAITING:
                continue
            if not 0 < num_tokens <= sequence.max_len:
                raise ProtocolViolation(f"sequence {sequence_id} was preempted with {num_tokens} tokens")
            self.release_table(state, sequence)
            sequence.num_tokens = num_tokens
            sequence.fork_of = None  # after its first own token, its tokens differ from its parent's
            sequence.recompute, sequence.computed = True, 0
            sequence.preemptions += 1
            sequence.queued_at = state.clock.monotonic()
            state.totals.preemptions += 1
            state.queue.add(sequence)

    def finish(self, state: LedgerState, finished: Iterable[tuple[SequenceId, FinishReason]]) -> None:
        """Forget sequences and release their block tables; an unknown id was forgotten before."""
        for sequence_id, _ in finished:
            sequence = state.sequences.get(sequence_id)
            if sequence is None:
                continue
            if sequence.phase is SequencePhase.WAITING:
                state.queue.remove(sequence)
            else:
                self.release_table(state, sequence)
            state.forget(sequence)

    def stall(self, state: LedgerState, stalled: tuple[SequenceId, ...]) -> None:
        state.stalled = stalled

    # ------------------------------------------------------------ releases

    def release_table(self, state: LedgerState, sequence: Sequence) -> None:
        """Drop every reference of a block table, tail first, so that children are evicted before their parents.

        The source of a copy that was not reported stands behind the shared blocks, so it comes before them.
        """
        state.halt(sequence, SequencePhase.WAITING)
        state.preempting.discard(sequence.id)
        state.admitted -= 1
        if sequence.retention and state.caches:
            state.retention.mark(sequence)
        self.release_source(state, sequence)
        self.release(state, [block for block in reversed(sequence.block_table) if block != TRIMMED])
        sequence.block_table = []
        sequence.trimmed = sequence.n_shared = 0
        state.leave_to_forks(sequence)

    def release_source(self, state: LedgerState, sequence: Sequence) -> None:
        state.release_source(sequence)

    def release(self, state: LedgerState, blocks: Iterable[BlockId]) -> None:
        state.release(blocks)
