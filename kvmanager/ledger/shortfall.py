"""The record of a sequence that was not admitted at once: what it lacks, who goes first, who holds the blocks.

There is one record for each wait, made when the wait begins. It names at most _REQUESTS requests and _TENANTS tenants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from common.contracts.types import TENANT_CANDIDATE, Candidate, DecisionKind, SequencePhase, ShortfallReason
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.ledger_state import LedgerState

_REQUESTS: Final = 8
_TENANTS: Final = 4


def explain_waits(state: LedgerState, head: Sequence, fresh_blocks: Callable[[Sequence], int]) -> None:
    """Record why the sequences that have joined the queue wait; `head` is admitted next.

    `fresh_blocks` returns how many blocks a sequence needs beside those that it would share.
    """
    waiting = [state.sequences[each] for each in state.queue.unexplained]
    state.queue.unexplained.clear()
    if not waiting:
        return
    holders, head_needed = _holders(state), fresh_blocks(head)
    for sequence in waiting:
        needed = head_needed if sequence is head else fresh_blocks(sequence)
        figures = {
            "needed": float(needed),
            "head_needed": float(head_needed),
            "available": float(state.block_pool.available),
            "num_blocks": float(state.config.num_blocks),
            "running": float(state.admitted),
            "waiting": float(len(state.queue)),
        }
        reason, first = _reason(state, sequence, head)
        kind = DecisionKind.SHORTFALL
        state.decisions.record(kind, "waits", sequence, (reason.value,), figures, holders, beneficiary=first)


def _reason(state: LedgerState, sequence: Sequence, head: Sequence) -> tuple[ShortfallReason, str]:
    """Return why a sequence waits, and the name of the one that goes first, unless it is this one."""
    if sequence is not head:
        return ShortfallReason.BEHIND, head.name
    return (ShortfallReason.PLACES if state.blocked_by == "places" else ShortfallReason.BLOCKS), ""


def _holders(state: LedgerState) -> tuple[Candidate, ...]:
    """Return the tenants and the requests that hold the most blocks; a shared block counts for its first sequence."""
    blocks: dict[str, int] = {}
    sequences: dict[str, int] = {}
    requests: dict[str, int] = {}
    for each in state.sequences.values():
        if each.phase is SequencePhase.WAITING:
            continue
        held = each.own_blocks
        blocks[each.tenant] = blocks.get(each.tenant, 0) + held
        sequences[each.tenant] = sequences.get(each.tenant, 0) + 1
        requests[each.name] = requests.get(each.name, 0) + held
    tenants = heapq.nlargest(_TENANTS, blocks, key=lambda tenant: (blocks[tenant], tenant))
    greatest = heapq.nlargest(_REQUESTS, requests, key=lambda name: (requests[name], name))
    return (
        *(_tenant(each, blocks[each], sequences[each]) for each in tenants),
        *(Candidate(each, terms=(("blocks", float(requests[each])),)) for each in greatest),
    )


def _tenant(name: str, blocks: int, sequences: int) -> Candidate:
    return Candidate(f"{TENANT_CANDIDATE}{name}", terms=(("blocks", float(blocks)), ("sequences", float(sequences))))
