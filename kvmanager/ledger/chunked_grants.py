"""Decides when a long prompt begins with a part of its blocks, and how many of the others it gets as they come free.

So the prefill of a huge prompt overlaps the end of the sequences whose blocks it waits for. Only the next sequence may
begin so, at most one of a worker. `grant_order.py` says who goes before it, and who waits for it.

The others keep what they need. Until the step by which the next sequence was foreseen to have its blocks, it takes none
that those which run may bind by then. A part of their runway stays in the lease pool, where the worker leaves it to
them. As soon as everything that the prompt lacks is there, it gets that, as a sequence does that is admitted whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.contracts.lease import RUNWAY_UNDER_PRESSURE
from common.contracts.types import SequenceId, SequencePhase
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.backfill import Growth, growth_beside
from kvmanager.ledger.grant_order import outranks
from kvmanager.ledger.ledger_state import LedgerState


def is_enough(config: LedgerConfig, part: int, fresh: int) -> bool:
    """Return whether a sequence that needs `fresh` blocks may begin with `part` of them."""
    return 2 * part >= fresh > part and part * config.block_size >= config.first_part


def first_part(state: LedgerState, head: Sequence, fresh: int, free: int, until: int | None) -> int:
    """Return the blocks with which a sequence begins that needs `fresh` of which `free` are there; 0: it waits.

    `until` is the step by which it was foreseen to have all of them, None where those that run do not release enough.
    What is leased beyond the part of the runway counts as taken: the worker may bind it before it hears the new target.
    """
    if until is None:
        return 0
    leased, others = state.store.pool.leased, _others(state, head)
    beyond = max(0, leased - _ahead(state.config, others))
    part = min(free, leased + free - beyond - others.blocks_after(max(0, until - state.worker.steps)))
    return part if is_enough(state.config, part, fresh) else 0


def left_to_others(state: LedgerState, begun: Sequence) -> int:
    """Return how many blocks are leased for those that run beside a begun prompt: a part of their runway."""
    return _ahead(state.config, _others(state, begun))


def lease_want(state: LedgerState, begun: Sequence) -> int:
    """Return how many blocks are leased while a begun prompt has its rank, and count its steps from now on."""
    begun.started_at = state.worker.steps
    config, pool, others = state.config, state.store.pool, _others(state, begun)
    ahead, lacking = _ahead(state.config, others), begun.lacking(config.block_size)
    if missing_blocks(state, begun) + ahead <= pool.leased:
        return ahead + lacking
    kept, there = state.admission.reservation, pool.available + pool.leased
    if kept is None or kept.sequence != begun.id or kept.until is None:
        return ahead
    return ahead + max(0, min(lacking, there - others.blocks_after(max(0, kept.until - state.worker.steps))))


def missing_blocks(state: LedgerState, part: Sequence) -> int:
    """Return how many blocks more must be free so that a sequence gets at once all that it lacks of its prompt."""
    lacking = part.lacking(state.config.block_size)
    slack = max(int(lacking < part.growth), state.config.watermark_blocks) if state.sequences.running > 1 else 0
    return lacking + slack - state.store.pool.available


def comes_first(state: LedgerState, begun: Sequence, sequence: Sequence) -> bool:
    """Return whether a waiting sequence is not admitted before the begun prompt has what it lacks.

    So it is until these blocks are leased. One that begins with the same blocks waits until they are in the block
    table: else both would compute them.
    """
    if outranks(sequence, begun):
        return False
    return state.store.pool.leased < begun.lacking(state.config.block_size) or begins_alike(begun, sequence)


def begins_alike(part: Sequence, sequence: Sequence) -> bool:
    """Return whether a waiting sequence could share the next block that one with a part of its prompt's blocks gets."""
    if sequence.fork_of == part.id:
        return True
    place = len(part.block_table)
    wanted = sequence.block_hashes[place : place + 1]
    return bool(wanted) and wanted == part.block_hashes[place : place + 1]


def partial_of(sequences: Iterable[Sequence], block_size: int) -> SequenceId | None:
    """Return the sequence of an inventory that runs with a part of its prompt's blocks."""
    found = (each.id for each in sequences if each.phase is SequencePhase.RUNNING and each.lacking(block_size))
    return next(found, None)


def _others(state: LedgerState, sequence: Sequence) -> Growth:
    return growth_beside(sequence, state.sequences.live.values(), state.worker.steps, state.config.block_size)


def _ahead(config: LedgerConfig, others: Growth) -> int:
    """Return how many blocks the worker leaves in its pool to the others: a part of their runway."""
    return -(-others.blocks_after(config.runway_slots) // RUNWAY_UNDER_PRESSURE)
