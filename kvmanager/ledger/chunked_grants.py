"""Decides when a long prompt begins with a part of its blocks, and how many of the others it gets as they come free.

So the prefill of a huge prompt overlaps the end of the sequences whose blocks it waits for. Only the next sequence may
begin so, at most one of a worker. `grant_order.py` says who goes before it, and who waits for it.

The others keep what they need. Until the step by which the next sequence was foreseen to have its blocks, it takes none
that those which run may hold by then. A part of their runway stays in the lease pool, where the worker leaves it to
them. As soon as everything that the prompt lacks is there, it gets that, as a sequence does that is admitted whole.

Where the pool has groups, a part is a number of places: those of the first group's table, and in each run as many of
them as a sequence holds at once.

    first group  | x | x | x | x | . | . |   begins with 4 places of 6, `lacking` 2
    a window     | t | x | x |   |   |   |   of which it holds 3 at once; it lacks 1 now, and binds 3 in all

What it lacks is what it needs at once: two blocks of the first group here, and one of the run. For the fourth place it
has the first group's block, so the run's is wanted as those of all prompts are that run: before any part is dealt out.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.contracts.lease import RUNWAY_UNDER_PRESSURE
from common.contracts.types import SequenceId, SequencePhase
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.backfill import Growth, growth_beside, running
from kvmanager.ledger.grant_order import outranks
from kvmanager.ledger.ledger_state import LedgerState


def is_enough(config: LedgerConfig, part: int, fresh: int) -> bool:
    """Return whether a sequence that needs `fresh` blocks in its block table may begin with `part` of them."""
    return 2 * part >= fresh > part and part * config.block_size >= config.first_part


def most_of_part(state: LedgerState, head: Sequence, free: int, until: int | None) -> int:
    """Return how many of the `free` blocks a sequence may begin with; 0 or less: it waits.

    `until` is the step by which it was foreseen to have all of them, None where those that run do not release enough.
    What is leased beyond the part of the runway counts as taken: the worker may bind it before it hears the new target.
    """
    if until is None:
        return 0
    leased, others = state.store.pool.leased, _others(state, head)
    beyond = max(0, leased - _ahead(state, others))
    return min(free, leased + free - beyond - others.blocks_after(max(0, until - state.worker.steps)))


def count_lacking(config: LedgerConfig, begun: Sequence) -> int:
    """Return how many blocks, or pages, a begun prompt lacks until it holds at once what its whole prompt needs."""
    places = begun.lacking(config.block_size)
    if not begun.runs or not places:
        return places
    whole = len(begun.block_table) + places
    runs = [run.pages * max(0, min(whole, run.most) - run.held) for run in begun.runs if not run.checkpoints]
    return begun.block_pages * places + sum(runs)


def left_to_others(state: LedgerState, begun: Sequence) -> int:
    """Return how many blocks are leased whatever a begun prompt lacks: for a part of the runway of all others.

    Where the pool has groups, prompts get what their windows take at the places that they have.
    """
    return _ahead(state, _others(state, begun))


def lease_want(state: LedgerState, begun: Sequence) -> int:
    """Return how many blocks are leased while a begun prompt has its rank, and count its steps from now on."""
    begun.started_at = state.worker.steps
    pool, others = state.store.pool, _others(state, begun)
    ahead, lacking = _ahead(state, others), count_lacking(state.config, begun)
    kept, there = state.admission.reservation, pool.available + pool.leased
    if missing_blocks(state, begun) + ahead <= pool.leased:
        return ahead + max(lacking, _chunk(state, begun, there - others.blocks_after(state.config.runway_slots)))
    if kept is None or kept.sequence != begun.id or kept.until is None:
        return ahead
    return ahead + max(0, min(lacking, there - others.blocks_after(max(0, kept.until - state.worker.steps))))


def _chunk(state: LedgerState, begun: Sequence, there: int) -> int:
    """Return how many pages a begun prompt takes for its next step at most, of those that are there.

    It gives those of its runs back that its window has left then. 0 where the pool has no groups.
    """
    if not begun.runs:
        return 0
    lacking, whole = begun.lacking(state.config.block_size), len(begun.block_table)
    runs = [run.pages * (whole + lacking - len(run.table)) for run in begun.runs if not run.checkpoints]
    return min(begun.block_pages * lacking + sum(runs), state.worker.lease_want, there)


def missing_blocks(state: LedgerState, part: Sequence) -> int:
    """Return how many blocks more must be free so that a sequence gets at once all that it lacks of its prompt."""
    config, slack = state.config, 0
    lacking = count_lacking(config, part)
    if state.sequences.running > 1:
        slack = max(config.stall_pages * (lacking < part.growth), config.watermark_blocks)
    return lacking + slack - state.store.pool.available


def comes_first(state: LedgerState, begun: Sequence, sequence: Sequence) -> bool:
    """Return whether a waiting sequence is not admitted before the begun prompt has what it lacks.

    So it is until these blocks are leased. Where the pool has groups, a place takes several pages, and those that are
    left to others would not do for one: they are leased besides. A sequence that begins with the same blocks waits
    until they are in the block table: else both would compute them.
    """
    if outranks(sequence, begun):
        return False
    wanted = count_lacking(state.config, begun)
    if begun.runs and wanted:
        wanted += left_to_others(state, begun)
    return state.store.pool.leased < wanted or begins_alike(begun, sequence)


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


def _ahead(state: LedgerState, others: Growth) -> int:
    """Return how many blocks the worker leaves in its pool to the others: a part of their runway.

    Where the pool has groups, a run may stand behind the first group's table, in a begun prompt too. Then a place of it
    is leased at least, and a part of what the worker wants for the next step.
    """
    ahead = -(-others.bound_after(state.config.runway_slots) // RUNWAY_UNDER_PRESSURE)
    if not state.config.groups:
        return ahead
    behind = place = 0
    for each in running(state.sequences.live.values()):
        most = len(each.block_table)
        for run in each.runs:
            if not run.checkpoints and len(run.table) < most:
                behind += run.pages * (most - len(run.table))
                place += run.pages
    return ahead + max(place, -(-min(behind, state.worker.lease_want) // RUNWAY_UNDER_PRESSURE))
