"""The preemption policy: which sequence loses its blocks when the pool is used up.

The victim has the lowest priority and, among those, the latest arrival. A sequence keeps its
arrival for life, so a preempted sequence is no later than before when it is admitted again. The most senior sequence
is never a victim. A sequence is preempted at most once for each block by which it and its seniors may still grow.
That bounds the lost work and lets every sequence end.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.lease import Preempt
from common.types import TRIMMED, Candidate, SequenceId, SequencePhase
from kvmanager.core.block import Block
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.sequence import Sequence


class PreemptionPolicy:
    """Orders one preemption at a time. It has no state of its own."""

    def preempt(self, state: LedgerState) -> tuple[Preempt, ...]:
        """Order a preemption when a sequence stalls and no block is left anywhere."""
        pool = state.block_pool
        if not state.stalled or state.running < 2 or state.preempting or pool.leased or pool.available:
            return ()
        stalled = state.live_stalled()
        if not stalled:
            return ()
        running = [each for each in state.sequences.values() if each.phase is SequencePhase.RUNNING]
        victim = choose_victim(running)
        decision = _record(state, victim, running, stalled)
        self.order(state, victim)
        return (Preempt(victim.id, decision),)

    def order(self, state: LedgerState, victim: Sequence) -> None:
        """Mark the victim. Its blocks are not free before the worker reports that it released them."""
        state.halt(victim, SequencePhase.DRAINING_PREEMPT)


def private_blocks(sequence: Sequence, blocks: list[Block]) -> int:
    """Return how many blocks of a block table no other sequence holds: the blocks that its preemption frees."""
    return sum(blocks[block].refs == 1 for block in sequence.block_table if block != TRIMMED)


def tokens_lost(sequence: Sequence, blocks: list[Block], block_size: int) -> int:
    """Return how many tokens of a sequence must be computed again if its sealed blocks stay cached.

    The number goes into the decision record. It may be some tokens low, because the worker reports lengths only at
    admission and every few steps (`Report.computed`).
    """
    sealed = sum(block == TRIMMED or blocks[block].hash is not None for block in sequence.block_table)
    return max(0, max(sequence.num_tokens, sequence.computed) - sealed * block_size)


def seniority(sequence: Sequence) -> tuple[int, int]:
    """Return the key by which sequences are ordered, the most senior first."""
    return (-sequence.priority, sequence.arrival)


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    return max(running, key=seniority)


def candidates(running: Iterable[Sequence], blocks: list[Block]) -> tuple[Candidate, ...]:
    """Return every running sequence with the terms of the choice, the first to be preempted first."""
    found = []
    for sequence in sorted(running, key=seniority, reverse=True):
        terms = (
            ("priority", float(sequence.priority)),
            ("arrival", float(sequence.arrival)),
            ("private_blocks", float(private_blocks(sequence, blocks))),
            ("num_tokens", float(sequence.num_tokens)),
        )
        found.append(Candidate(sequence.name, terms=terms))
    return tuple(found)


def _record(state: LedgerState, victim: Sequence, running: list[Sequence], stalled: list[SequenceId]) -> str:
    beneficiary = min((state.sequences[each] for each in stalled), key=seniority)
    blocks = state.block_pool.blocks
    figures = {
        "tokens_lost": float(tokens_lost(victim, blocks, state.config.block_size)),
        "blocks_freed": float(private_blocks(victim, blocks)),
        "stalled": float(len(stalled)),
        "running": float(state.running),
    }
    return state.decisions.preempted(victim, beneficiary, figures, candidates(running, blocks))
