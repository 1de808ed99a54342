"""Who may take the next free block. Leases, admissions, preemptions and backfilling all ask this one order.

    1  running sequences: by a lease ahead of need; where one is stalled and no block is left, by a preemption
    2  the next waiting sequence, if it outranks the begun prompt and its blocks are free now, or after a preemption
    3  the begun prompt: one that runs with a part of its prompt's blocks
    4  the next waiting sequence: after `in_turn` admissions by priority one by age, else the highest priority
    5  sequences that pass the next one without delaying it (`backfill.py`)

Ranks 1, 3 and 4 hold back what is free from the ranks behind them. Rank 2 does not: what the begun prompt takes
meanwhile, a preemption of the begun prompt frees. A higher priority outranks a begun prompt, unless that is protected
by its age. A begun prompt that is old takes a turn by age as one that waits does.

Why nobody waits for ever, while messages arrive and steps run:

* A running sequence that is not stalled is computed, step by step, up to its greatest length at most. So it ends.
* If all that run are stalled, they get what is free or cached. If nothing is, all but the most senior can be preempted.
  Those that are spared hold all blocks that they may ever need, so they are not stalled.
* If the begun prompt runs alone, all other blocks are free, cached or leased to it. Then the next waiting sequence is
  admitted, or preempts the begun prompt, which frees the whole pool; or else the begun prompt gets all that it lacks.
  Its checkpoints of states fit into the pool beside all that it ever holds at once.
* If none runs, the whole pool is free or cached. The next waiting sequence fits into it, or it was refused on arrival.
* A preemption for a waiting sequence frees what that lacks at the time. Others may come first all the same: an arrival,
  an old sequence, another tenant. Each of these is an admission, so something runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from common.contracts.turns import choose_by_age, is_old
from common.contracts.types import SequenceId
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.ledger_state import Admission, LedgerState
from kvmanager.ledger.shares import TenantShares


class Turn(NamedTuple):
    """The waiting sequence that is admitted next, and whether its age is the reason."""

    sequence: Sequence
    by_age: bool


def next_turn(state: LedgerState) -> Turn:
    """Return whose turn it is. The queue must not be empty.

    Without an old sequence, or before the turn of one, it is the highest priority, then the tenant of the least load,
    then the first arrival.
    """
    if _is_turn_by_age(state) and (old := _oldest(state)) is not None:
        return Turn(old, True)
    heads = [state.sequences.live[each] for each in state.sequences.queue.heads()]
    if len(heads) == 1:
        return Turn(heads[0], False)
    shares = TenantShares(state.config, state.sequences.tenants)
    return Turn(min(heads, key=lambda each: (shares.load_of(each.tenant), each.arrival)), False)


def count_turn(admission: Admission, turn: Turn) -> None:
    """Count a turn that was taken. One that was taken by age protects from preemption by a higher priority."""
    turn.sequence.by_age = turn.by_age
    admission.admitted_in_turn = 0 if turn.by_age else admission.admitted_in_turn + 1


def take_turn_by_age(state: LedgerState) -> None:
    """Let an old begun prompt take the turn by age, where a higher priority waits that would take its blocks."""
    begun = state.sequences.find_begun_prompt()
    if begun is None or not _is_turn_by_age(state) or not _is_old(state, begun):
        return
    if any(outranks(state.sequences.live[each], begun) for each in state.sequences.queue.heads()):
        count_turn(state.admission, Turn(begun, True))


def outranks(sequence: Sequence, running: Sequence) -> bool:
    """Return whether a waiting sequence goes before one that runs: it may preempt that, and passes a begun prompt."""
    return sequence.priority > running.priority and not running.by_age


def _is_turn_by_age(state: LedgerState) -> bool:
    return state.admission.admitted_in_turn >= state.config.in_turn


def _oldest(state: LedgerState) -> Sequence | None:
    """Return the old sequence that is next by age. A tenant over its share has none while others wait."""
    shares = TenantShares(state.config, state.sequences.tenants)
    oldest = [_first_old(state, line) for line in state.sequences.queue.by_arrival()]
    return choose_by_age(oldest, lambda each: _is_old(state, each), lambda each: shares.load_of(each.tenant))


def _first_old(state: LedgerState, line: Iterable[SequenceId]) -> Sequence:
    """Return the first arrival that is old; where none is, any other one. The line must not be empty.

    A sequence that never ran has waited for longer than all later arrivals. So the search ends there.
    """
    for each in line:
        sequence = state.sequences.live[each]
        if not sequence.preemptions or _is_old(state, sequence):
            break
    return sequence


def _is_old(state: LedgerState, sequence: Sequence) -> bool:
    return is_old(sequence.waited + state.clock.monotonic() - sequence.queued_at, state.config.max_wait)
