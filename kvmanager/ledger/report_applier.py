"""Applies a worker's report to the ledger's state, column by column in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import key_of
from common.contracts.lease import Report, Reserve
from common.contracts.types import TRIMMED, BlockHash, BlockId, FinishReason, KvGroupKind, SequenceId, SequencePhase
from kvmanager.contracts.block import IN_USE
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger import ahead, checkpoints, transfers
from kvmanager.ledger.ledger_state import LedgerState

_WAITING, _RUNNING = SequencePhase.WAITING, SequencePhase.RUNNING

Column = tuple[Callable[[Report], Any], Callable[[LedgerState, Any], None]]
"""How to read a column of a report, and how to apply its entries."""


def apply_report(state: LedgerState, report: Report) -> None:
    """Apply a report. Raises ProtocolViolation; the ledger is then void until the next rebuild."""
    state.worker.count_steps(report.step)
    for entries_of, apply_entries in GROUP_COLUMNS if state.config.groups else COLUMNS:
        entries = entries_of(report)
        if entries:
            apply_entries(state, entries)
    if report.disk_closed:
        transfers.close_disk(state)
    if report.draining:
        state.worker.draining = True
        ahead.end_wishes(state, ahead.DRAINS)
    if report.transfer_costs is not None:
        transfers.note_costs(state, report.transfer_costs)
        if not state.store.loads:
            ahead.end_wishes(state, ahead.NO_GAIN)
    if report.stalled is not None:
        note_stalled(state, report.stalled)
    state.worker.lease_want = report.lease_want
    state.worker.resets.confirmed = report.reset or state.worker.resets.confirmed
    for sequence_id, length in report.computed:
        if sequence_id in state.sequences.live:
            state.sequences.live[sequence_id].computed = length


def reserve_sequences(state: LedgerState, reserves: Iterable[Reserve]) -> None:
    """Queue sequences in the order of their arrival."""
    for reserve in reserves:
        state.queue_or_refuse(
            state.sequences.register_sequence(reserve, state.sequences.next_arrival, state.clock.monotonic())
        )


def bind_blocks(state: LedgerState, bindings: Iterable[tuple[SequenceId, BlockId]]) -> None:
    """Append leased blocks to block tables."""
    bound: dict[str, int] = {}
    find, bind, append = state.sequences.live.get, state.store.pool.bind_block, state.store.append_block
    for sequence_id, block_id in bindings:
        sequence = find(sequence_id)
        if sequence is None or sequence.phase is _WAITING:
            raise ProtocolViolation(f"block {block_id} was bound to sequence {sequence_id}, which has no block table")
        if len(sequence.block_table) >= sequence.max_blocks:
            raise ProtocolViolation(f"sequence {sequence_id} grew beyond {sequence.max_blocks} blocks")
        bind(block_id)
        append(block_id, sequence)
        if sequence.phase is _RUNNING:
            bound[sequence.tenant] = bound.get(sequence.tenant, 0) + 1
    for tenant, count in bound.items():
        state.sequences.growth -= count
        state.sequences.tenants[tenant] = state.sequences.tenants[tenant].more(0, count)


def seal_blocks(state: LedgerState, seals: Iterable[tuple[BlockId, BlockHash]]) -> None:
    """Register full, computed blocks whose parent is registered; count and ignore the others."""
    store, live = state.store, state.sequences.live
    blocks, entries = store.blocks, store.cache.entries
    states, hash_of, parent_of, pending = blocks.state, blocks.hash, blocks.parent, blocks.pending
    owner_of, depth_of, awaited = blocks.owner, blocks.index, blocks.awaited
    may_publish, publish_new = state.may_publish, store.publish_new_block
    for block, block_hash in seals:
        if not 0 <= block < len(states):
            store.pool.check_block(block)
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
            store.publish_block(block, block_hash, parent)
        else:
            publish_new(block, block_hash, parent)
        if block in awaited:
            state.count_awaited(block)
        owner = live.get(owner_of[block])
        if owner is not None and depth_of[block] == len(owner.block_hashes):
            owner.block_hashes.append(block_hash)


def index_partial_hashes(state: LedgerState, partials: Iterable[tuple[BlockHash, tuple[BlockHash, ...]]]) -> None:
    """Note the partial hashes of sealed blocks; those of a block whose seal was ignored are ignored too."""
    if not state.config.copies_parts:
        return
    entries, hash_of, add = state.store.cache.entries, state.store.blocks.hash, state.store.cache.partials.add
    for block_hash, parts in partials:
        if (block := entries.get(block_hash)) is not None:
            # The object that the map has already: each one from the wire would be kept beside it.
            add(hash_of[block] or block_hash, parts)


def release_copy_sources(state: LedgerState, sequences: Iterable[SequenceId]) -> None:
    """Stop holding the sources of copies that have run; a sequence that left holds none."""
    for sequence_id in sequences:
        sequence = state.sequences.live.get(sequence_id)
        if sequence is not None:
            state.release_copy_source(sequence)


def trim_tables(state: LedgerState, trims: Iterable[tuple[SequenceId, int]]) -> None:
    """Release leading blocks that left every layer's window; the block table keeps their places."""
    for sequence_id, count in trims:
        sequence = state.sequences.live.get(sequence_id)
        if sequence is None:
            continue
        table = sequence.block_table
        if count > len(table):
            raise ProtocolViolation(f"{count} blocks of a block table of {len(table)} were trimmed")
        trimmed = range(sequence.trimmed, count)
        if sequence.retention and state.config.prefix_caching:
            state.store.retention.mark_blocks(sequence, table, sequence.trimmed, count)
        state.store.release_blocks([table[index] for index in trimmed])
        table[sequence.trimmed : count] = [TRIMMED] * len(trimmed)
        held = sequence.own_blocks
        sequence.trimmed = max(sequence.trimmed, count)
        if sequence.phase is SequencePhase.RUNNING:
            state.sequences.count_tenant_use(sequence, 0, sequence.own_blocks - held)


def take_back_blocks(state: LedgerState, blocks: Iterable[BlockId]) -> None:
    """Free leased blocks that the worker returned."""
    for block_id in blocks:
        state.store.pool.return_block(block_id)


def requeue_preempted(state: LedgerState, preempted: Iterable[tuple[SequenceId, int]]) -> None:
    """Release the block tables of preempted sequences and queue the sequences again at their old places."""
    for sequence_id, num_tokens in preempted:
        sequence = state.sequences.live.get(sequence_id)
        if sequence is None or sequence.phase is SequencePhase.WAITING:
            continue
        if not 0 < num_tokens <= sequence.max_len:
            raise ProtocolViolation(f"sequence {sequence_id} was preempted with {num_tokens} tokens")
        release_block_table(state, sequence)
        sequence.num_tokens = num_tokens
        sequence.fork_of = None  # after its first own token, its tokens differ from its parent's
        sequence.recompute, sequence.awaited, sequence.computed = True, False, 0
        sequence.fetch, sequence.asked_peers = None, False
        sequence.preemptions += 1
        sequence.queued_at = state.clock.monotonic()
        state.totals.preemptions += 1
        state.sequences.queue.add_sequence(sequence)


def finish_sequences(state: LedgerState, finished: Iterable[tuple[SequenceId, FinishReason]]) -> None:
    """Forget sequences and release their block tables; an unknown id was forgotten before."""
    for sequence_id, _ in finished:
        sequence = state.sequences.live.get(sequence_id)
        if sequence is None:
            continue
        if sequence.phase is SequencePhase.WAITING:
            if sequence_id in state.sequences.fetching:
                transfers.stop_awaiting(state, sequence)
            elif not state.sequences.planned.stop_waiting(sequence_id):
                state.sequences.queue.remove_sequence(sequence)
        else:
            release_block_table(state, sequence)
        state.sequences.forget_sequence(sequence)


def note_stalled(state: LedgerState, stalled: tuple[SequenceId, ...]) -> None:
    state.sequences.stalled = stalled


# ------------------------------------------------------------ releases


def release_block_table(state: LedgerState, sequence: Sequence) -> None:
    """Drop every reference of a block table, tail first, so that children are evicted before their parents.

    The source of a copy that was not reported stands behind the shared blocks, so it comes before them. Where the pool
    has groups, the blocks of runs come before those of the first group.
    """
    state.sequences.halt_sequence(sequence, SequencePhase.WAITING)
    state.sequences.preempting.discard(sequence.id)
    state.sequences.admitted -= 1
    if sequence.retention and state.config.prefix_caching:
        for table in (*(run.table for run in sequence.runs), sequence.block_table):
            state.store.retention.mark_blocks(sequence, table)
    state.release_copy_source(sequence)
    if state.store.disk is not None:
        transfers.queue_saves(state, sequence)
    state.store.release_blocks(sequence.held_blocks())
    sequence.block_table = []
    for run in sequence.runs:
        _end_planned(state, sequence, run, len(run.table))
        run.empty()
    sequence.trimmed, sequence.n_shared, sequence.has_tail = 0, 0, False
    state.sequences.leave_blocks_to_forks(sequence)


COLUMNS: Final[tuple[Column, ...]] = (
    (attrgetter("reserve"), reserve_sequences),
    (attrgetter("bind"), bind_blocks),
    (attrgetter("seal"), seal_blocks),
    (attrgetter("partials"), index_partial_hashes),
    (attrgetter("copied"), release_copy_sources),
    (attrgetter("trim"), trim_tables),
    (attrgetter("ended"), transfers.end_transfers),
    (attrgetter("returned"), take_back_blocks),
    (attrgetter("preempted"), requeue_preempted),
    (attrgetter("finished"), finish_sequences),
)
"""The order of effects. In another order, a sequence that was preempted and cancelled within one report would return to
the queue and wait for ever."""


# ------------------------------------------------------------ where the pool has groups


def bind_pages(state: LedgerState, report: Report) -> None:
    """Append blocks of leased pages to the tables of their groups."""
    groups, pages, at = state.config.groups, report.bind_pages, 0
    if len(report.bind_groups) != len(report.bind):
        raise ProtocolViolation(f"{len(report.bind)} blocks were bound, to {len(report.bind_groups)} groups")
    for (sequence_id, block), group in zip(report.bind, report.bind_groups, strict=True):
        sequence = state.sequences.live.get(sequence_id)
        bound = group < len(groups) and groups[group].kind is not KvGroupKind.STATE
        if sequence is None or sequence.phase is _WAITING or not bound:
            raise ProtocolViolation(
                f"block {block} was bound to sequence {sequence_id} in group {group}, where there is no table"
            )
        others, at = pages[at : at + groups[group].pages - 1], at + groups[group].pages - 1
        run = sequence.runs[group - 1] if group else None
        # A block of a run stands beside one of the first group.
        most = len(sequence.block_table) if group else sequence.max_blocks
        if len(sequence.block_table if run is None else run.table) >= most or at > len(pages):
            raise ProtocolViolation(
                f"sequence {sequence_id} grew beyond {most} blocks in group {group}, or lacks pages"
            )
        state.store.pool.bind_pages(block, group, others)
        if run is None:
            state.store.append_block(block, sequence)
        else:
            state.store.append_run_block(block, sequence, run)
        if sequence.phase is _RUNNING:
            state.sequences.growth -= groups[group].pages
            state.sequences.count_tenant_use(sequence, 0, groups[group].pages)
    if at != len(pages):
        raise ProtocolViolation(f"{len(pages)} further pages came with blocks that have {at}")


def seal_in_groups(state: LedgerState, seals: Iterable[tuple[BlockId, BlockHash]]) -> None:
    """Do what `seal_blocks` does; a block of a run is registered after the first group's block of its content."""
    store, blocks = state.store, state.store.blocks
    for block, block_hash in seals:
        store.pool.check_block(block)
        group = blocks.group[block]
        is_tail = store.is_checkpoint(block) and _follow_tail(state, block, block_hash)
        parent = _parent_to_seal(state, block, block_hash)
        key, expected = key_of(block_hash, group), blocks.pending[block]
        if parent is None or not state.may_publish(block, key, parent):
            state.totals.ignored_seals += 1
            continue
        if expected is not None and expected != key:
            raise ProtocolViolation(f"block {block} was sealed with another hash than its prompt's")
        if key in store.cache.entries:
            store.publish_block(block, key, parent)
        else:
            store.publish_new_block(block, key, parent, checkpoints.enter_checkpoint(state, block, block_hash, is_tail))
        if group:
            continue
        if block in blocks.awaited:
            state.count_awaited(block)
        owner = state.sequences.live.get(blocks.owner[block])
        if owner is not None and blocks.index[block] == len(owner.block_hashes):
            owner.block_hashes.append(block_hash)


def _parent_to_seal(state: LedgerState, block: BlockId, block_hash: BlockHash) -> BlockHash | None:
    """Return the hash before a block that is about to be sealed; None: it is not known, or the block is sealed.

    Raises ProtocolViolation if a block of a run has not the content of its place.
    """
    blocks = state.store.blocks
    if blocks.state[block] is not IN_USE or blocks.hash[block] is not None:
        return None
    parent = state.parent_of(block)
    if not blocks.group[block] or parent in (None, block_hash):
        return parent
    owner = state.sequences.live.get(blocks.owner[block])
    known = owner.block_hashes if owner is not None else []
    lacks = owner is not None and len(known) < len(owner.block_table)
    if lacks and state.store.is_checkpoint(block) and block_hash not in known:
        return None  # a tail behind a block whose own seal was ignored
    raise ProtocolViolation(f"block {block} was sealed with another hash than its prompt's")


def _follow_tail(state: LedgerState, block: BlockId, block_hash: BlockHash) -> bool:
    """Transfer the tail of a sequence to the place of the content that it is sealed with; return whether it was one."""
    blocks = state.store.blocks
    owner, place = state.sequences.live.get(blocks.owner[block]), blocks.index[block]
    run = owner.runs[blocks.group[block] - 1] if owner is not None else None
    if owner is None or run is None or blocks.hash[block] is not None or run.table[-1:] != [block]:
        return False
    hashes = owner.block_hashes[: len(owner.block_table)]
    there = next((at for at in range(len(hashes) - 1, place, -1) if hashes[at] == block_hash), None)
    if there is None:
        return False
    run.move_tail(there)
    blocks.index[block], blocks.parent[block] = there, block_hash
    return True


def trim_runs(state: LedgerState, report: Report) -> None:
    """Release leading blocks of runs that no token reads any more; the tables keep their places."""
    if len(report.trim_groups) != len(report.trim):
        raise ProtocolViolation(f"{len(report.trim)} tables were trimmed, of {len(report.trim_groups)} groups")
    for (sequence_id, count), group in zip(report.trim, report.trim_groups, strict=True):
        sequence = state.sequences.live.get(sequence_id)
        if sequence is None:
            continue
        run = sequence.runs[group - 1] if 0 < group <= len(sequence.runs) else None
        if run is None or count > len(run.table):
            raise ProtocolViolation(f"{count} blocks of sequence {sequence_id} were trimmed in group {group}")
        held = sequence.own_blocks
        if sequence.retention and state.config.prefix_caching:
            state.store.retention.mark_blocks(sequence, run.table, run.trimmed, count)
        _end_planned(state, sequence, run, count)
        state.store.release_blocks([block for block in run.table[run.trimmed : count] if block != TRIMMED])
        run.table[run.trimmed : count] = [TRIMMED] * (count - run.trimmed)
        run.trimmed = max(run.trimmed, count)
        if sequence.phase is SequencePhase.RUNNING:
            state.sequences.count_tenant_use(sequence, 0, sequence.own_blocks - held)


def _end_planned(state: LedgerState, sequence: Sequence, run: Run, count: int) -> None:
    """Let nobody wait any more for what the sequence was to leave at the next places of a run, up to so many."""
    if run.checkpoints:
        for place in range(run.trimmed, min(count, len(sequence.block_hashes))):
            if run.table[place] != TRIMMED:
                state.sequences.end_planned(sequence.block_hashes[place], sequence.id)


def _with(column: str) -> Callable[[Report], Report | None]:
    """Return what gives a report where it has entries in a column, and None where not."""
    return lambda report: report if getattr(report, column) else None


GROUP_COLUMNS: Final[tuple[Column, ...]] = (
    (attrgetter("reserve"), reserve_sequences),
    (_with("bind"), bind_pages),
    (attrgetter("seal"), seal_in_groups),
    (_with("trim"), trim_runs),
    *COLUMNS[-4:],
)
"""The same order where the pool has groups; no part of a block is copied then."""
