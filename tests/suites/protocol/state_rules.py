"""Simpler rules of pools with checkpoints of states."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.lease import GrantBatch, Inventory, InventorySequence
from common.contracts.types import TRIMMED, BlockHash, BlockId, KvGroupKind, SequenceId
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow
from gpuworker.scheduling.lease_agent import BlockCloser, LeaseAgent
from gpuworker.scheduling.outcomes import Applied
from gpuworker.scheduling.sequence import Sequence as WorkerSequence
from gpuworker.scheduling.step_scheduler import Composition, StepScheduler
from kvmanager.cache.group_match import GroupMatch, GroupMatcher
from kvmanager.cache.prefix_cache import RememberedMatch, RunHits
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger import grant_plan, rebuild
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.grant_plan import GrantPlan
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.sequence_table import SequenceTable

_inventory = LeaseAgent.inventory
_match, _apply_grant, _seal_runs = GroupMatcher.match, LeaseAgent.apply_grant, BlockCloser._seal_runs
_trim_runs = BlockCloser._trim_runs
_note_states, _requeue = StepScheduler._note_states, WorkerSequence.requeue
_append_run_block, _restore_tables = BlockStore.append_run_block, rebuild._restore_tables
_plan_on_hits = grant_plan._plan_on_hits


# ---------------------------------------------------------------- the worker


def leave_out_checkpoints(agent: LeaseAgent) -> Inventory:
    """An inventory has the checkpoints that are sealed, and not those of rows in flight or to come."""
    whole, made = _inventory(agent), agent._blocks.made
    if made is None:
        return whole
    sequences = tuple(replace(each, runs=(*each.runs[:-1], ())) for each in whole.sequences)
    kept = {each.block for each in whole.cached_blocks}
    kept |= {block for each in sequences for table in (each.block_table, *each.runs) for block in table}
    at, groups, pages = 0, list[int](), list[BlockId]()
    for group in whole.block_groups:
        block, count = whole.block_pages[at], agent.config.groups[group].pages
        if block in kept:
            groups.append(group)
            pages += whole.block_pages[at : at + count]
        at += count
    return replace(whole, sequences=sequences, block_groups=tuple(groups), block_pages=tuple(pages))


def let_the_source_go(agent: LeaseAgent, batch: GrantBatch) -> Applied:
    """A checkpoint is released as soon as a sequence is admitted on it, before a step has loaded it."""
    applied = _apply_grant(agent, batch)
    for admit in applied.admitted:
        sequence = agent._sequences.get(admit.sequence)
        if sequence is not None and sequence.loads is not None and sequence.checkpoints is not None:
            agent._blocks.let_go(sequence.checkpoints.trim(admit.n_shared), 0)
            agent._report.trim_run(sequence.id, len(sequence.tables) - 1, admit.n_shared)
    return applied


def keep_what_it_was_to_load(sequence: WorkerSequence) -> None:
    """A preempted sequence begins with the states that its former grant named."""
    loads = sequence.loads
    _requeue(sequence)
    sequence.loads = loads


def go_on_past_checkpoints(_scheduler: StepScheduler, _sequence: WorkerSequence, _start: int, end: int) -> int:
    """No chunk ends where a checkpoint is to stand."""
    return end


def save_behind_the_chunk(scheduler: StepScheduler, sequence: WorkerSequence, step: Composition) -> None:
    """The states behind a chunk are saved for each checkpoint that it reaches, wherever in a block it ends."""
    table, size = sequence.checkpoints, scheduler.block_size
    assert table is not None
    had, first = len(step.saves), next((place for place, block in enumerate(table.blocks()) if block != TRIMMED), 0)
    _note_states(scheduler, sequence, step)
    if len(step.saves) == had and sequence.num_computed_tokens >= (first + 1) * size:
        made, block = scheduler.blocks.made, table.block(first)
        if made is not None and block != TRIMMED:
            step.saves.append(Checkpoint(sequence.id, made.pages[block]))


def seal_every_checkpoint(
    closer: BlockCloser, row: ScheduledRow, sequence: WorkerSequence, index: int, step: int
) -> None:
    """A checkpoint that a row passes is sealed, wherever the row ends."""
    _seal_runs(closer, row._replace(length=(index + 1) * closer._block_size - row.start), sequence, index, step)


def save_nothing(scheduler: StepScheduler, sequence: WorkerSequence, step: Composition) -> None:
    """Chunks end at checkpoints, and nobody saves the states there."""
    had = len(step.saves)
    _note_states(scheduler, sequence, step)
    del step.saves[had:]


def load_nothing(scheduler: StepScheduler, sequence: WorkerSequence, step: Composition) -> None:
    """A sequence goes on behind a checkpoint with what lies at its place."""
    sequence.loads = None
    _note_states(scheduler, sequence, step)


def trim_ahead_of_saves(closer: BlockCloser, sequence: WorkerSequence, _next_position: int, step: int) -> None:
    """A checkpoint is released once a plan has passed it, although the step that saves it is in flight."""
    _trim_runs(closer, sequence, sequence.num_computed_tokens, step)


# ---------------------------------------------------------------- the manager


def hit_without_states(matcher: GroupMatcher) -> GroupMatch:
    """K/V alone decides how deep a prompt hits."""
    found = _match(matcher)
    if found.sealed <= len(found.hits):
        return found
    hits = matcher._cache.find_longest_prefix(matcher._hashes, found.sealed)
    runs = tuple([RunHits(len(hits), []) for _ in found.runs])
    return found._replace(hits=hits, runs=runs, match=replace(found.match, hit_blocks=len(hits)))


def hit_with_earlier_states(matcher: GroupMatcher) -> GroupMatch:
    """K/V alone decides how deep a prompt hits, and it goes on from the deepest checkpoint before that."""
    found, deeper = _match(matcher), hit_without_states(matcher)
    if not found.hits or len(deeper.hits) == len(found.hits):
        return found
    *others, states = found.runs
    runs = (*others, RunHits(len(deeper.hits) - 1, states.blocks))
    return deeper._replace(runs=runs)


def wait_for_what_is_hit(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    """A sequence waits until its hits fit beside what it computes."""
    return _plan_on_hits(state, sequence, found)


def wake_nobody(sequences: SequenceTable, state: BlockHash, owner: SequenceId | None = None) -> None:
    """Who waits for a checkpoint is forgotten with it."""
    sequences.planned.end(state, owner)


def follow_nothing(_state: LedgerState, _block: BlockId, _block_hash: BlockHash) -> bool:
    """A tail stays where it was granted."""
    return False


def share_what_is_to_be_saved(store: BlockStore, block: BlockId, sequence: Sequence, run: Run) -> None:
    """A checkpoint counts as pending, as a block of K/V does, before it is saved."""
    sparse, run.checkpoints = run.checkpoints, False
    _append_run_block(store, block, sequence, run)
    run.checkpoints = sparse


def share_with_forks(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    """A fork shares the K/V of its parent, whether or not it has states to go on from."""
    parent = grant_plan.find_fork_parent(state.sequences, sequence)
    if parent is not None:
        shared = parent.block_table[: state.config.hits_of(sequence.num_tokens)]
        if len(shared) > len(found.hits):
            runs = tuple([RunHits(len(shared), []) for _ in found.runs])
            found = replace(found, hits=shared, runs=runs, cached_hits=0)
    return _plan_on_hits(state, sequence, found)


def forget_what_is_to_be_saved(state: LedgerState, sequence: Sequence, entry: InventorySequence) -> None:
    """A rebuild leaves out checkpoints: they are no hits, and the sequence could do without them."""
    kinds = [group.kind for group in state.config.groups[1:]]
    runs = [() if kind is KvGroupKind.STATE else run for kind, run in zip(kinds, entry.runs, strict=True)]
    _restore_tables(state, sequence, replace(entry, runs=tuple(runs)))
