"""Simpler rules of the worker's cores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from common.contracts.lease import Admit, Copy, GrantBatch, Inventory
from common.contracts.types import BlockHash, BlockId, SequenceId, SequencePhase
from gpuworker.scheduling.batch_plan import ScheduledRow
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.departures import Departures
from gpuworker.scheduling.lease_agent import BlockCloser, GrantApplier, LeaseAgent
from gpuworker.scheduling.lease_session import LeaseSession
from gpuworker.scheduling.outcomes import Applied
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.report_builder import SessionState
from gpuworker.scheduling.sequence import Sequence as WorkerSequence
from gpuworker.scheduling.step_scheduler import Composition, StepScheduler
from tests.suites.protocol.world import World

_admit, _inventory, _apply = GrantApplier._admit, LeaseAgent.inventory, LeaseAgent.apply_grant
_close, _advance = BlockCloser.close, WorkerSequence.advance
_copy = BlockStates.copy
_take, _leave_if_idle = StepScheduler._take, Departures.leave_if_idle


def reset_only_when_it_waits(grants: GrantApplier, admit: Admit, copied: frozenset[BlockId]) -> bool:
    sequence = grants._sequences.get(admit.sequence)
    return sequence is not None and sequence.phase is SequencePhase.WAITING and _admit(grants, admit, copied)


def wait_for_the_filler(scheduler: StepScheduler, sequence: WorkerSequence, room: int, step: Composition) -> int:
    """What an admission counted as shared is left to the sequence that was to fill it."""
    waits = sequence.num_computed_tokens < (sequence.announced_hits or 0)
    return 0 if waits else _take(scheduler, sequence, room, step)


def report_the_release_at_once(departures: Departures, sequence: WorkerSequence, step: int) -> None:
    if sequence.phase is SequencePhase.DRAINING_FINISH and sequence.in_flight:
        departures._report.finished(sequence.id, sequence.reason)
    else:
        _leave_if_idle(departures, sequence, step)


def apply_what_was_buffered(session: LeaseSession, _number: int, batch: GrantBatch) -> Applied | None:
    return session.agent.apply_grant(batch) if session.open else None


def accept_any_manager(session: LeaseSession, _epoch: int) -> bool:
    return True


def obey_one_preemption(agent: LeaseAgent, batch: GrantBatch) -> Applied:
    return _apply(agent, replace(batch, preempt=batch.preempt[:1]))


def leave_out_draining(agent: LeaseAgent) -> Inventory:
    whole, phases = _inventory(agent), (SequencePhase.WAITING, SequencePhase.RUNNING)
    return replace(whole, sequences=tuple(each for each in whole.sequences if each.phase in phases))


def adopt_orphans(_blocks: BlockStates, content: Content, index: dict[BlockHash, int]) -> int | None:
    return -1 if content.parent is None else index.get(content.parent, -1)


def keep_the_claim_until_bound(blocks: BlockStates, block: BlockId) -> None:
    blocks.pool.append(block)


def copy_what_will_be_there(blocks: BlockStates, _src: BlockId, dst: BlockId, slots: int) -> None:
    blocks.drop_claim(dst)
    blocks.fill[dst] = slots


def copy_all_that_is_there(blocks: BlockStates, src: BlockId, dst: BlockId, _slots: int) -> None:
    blocks.drop_claim(dst)
    blocks.fill[dst] = blocks.fill[src]


def copy_with_the_claim(blocks: BlockStates, src: BlockId, dst: BlockId, slots: int) -> None:
    _copy(blocks, src, dst, slots)
    if src in blocks.content:
        blocks.content[dst] = blocks.content[src]


def report_copies_at_once(agent: LeaseAgent, batch: GrantBatch) -> Applied:
    applied = _apply(agent, batch)
    agent._report.copied([admit.sequence for admit in applied.admitted])
    return applied


def report_by_sequence(copies: PartialCopies, _ran: Iterable[Copy]) -> tuple[SequenceId, ...]:
    """Whatever has run, the copies of all sequences count as run."""
    found = tuple(copies._by_sequence)
    copies._by_sequence.clear()
    return found


def keep_content(agent: LeaseAgent) -> None:
    """Pending report content survives into the next session."""
    agent._report.state = SessionState.DETACHED


def attach_without_a_target(agent: LeaseAgent, _lease_target: int) -> None:
    agent._report.state = SessionState.OPEN


def seal_drafts(closer: BlockCloser, sequence: WorkerSequence, row: ScheduledRow, _end: int, step: int) -> None:
    _close(closer, sequence, row, row.start + row.length + len(row.drafts), step)


def compute_a_refused_draft(sequence: WorkerSequence, end: int, right: int) -> int:
    return _advance(sequence, end, right + 1)


def lose_the_blocks_of_drafts(sequence: WorkerSequence, end: int, right: int) -> int:
    """Blocks that refused drafts have written leave the block table, and nothing is told of it."""
    advanced = _advance(sequence, end, right)
    if right < 1:
        del sequence.block_table[-1:]
        sequence.snapshot = None
    return advanced


def reuse_ids(world: World) -> SequenceId:
    return next(SequenceId(n) for n in range(99) if n not in world.agent._sequences)


def always_keep_a_block(_scheduler: StepScheduler, _sequence: WorkerSequence, _slots: int) -> int:
    """A prompt leaves a block to decodes, whether or not there are any."""
    return 1


def take_any_table(
    admit: Admit, empty: int, blocks: BlockStates, sequence: WorkerSequence | None, block_size: int, window: int
) -> None:
    """A block table without its first blocks is not checked."""
