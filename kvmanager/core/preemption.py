"""The preemption policy: which sequence loses its blocks when the pool is used up, or for whom else.

The victim has the lowest priority, then the tenant of the greatest load, then the latest arrival. A sequence keeps its
arrival for life. The most senior sequence is never a victim, so it ends, and then another one is the most senior: every
sequence ends.

A sequence that waits for admission is entitled to a preemption in two cases. Its priority is higher than the victim's.
Or its tenant is within its share with it, the victim's tenant is over its share, and one of that tenant's sequences
goes on. With the victim, that tenant would be over its share again, so the two never take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from common.lease import Preempt
from common.types import TRIMMED, BlockId, Candidate, SequenceId, SequencePhase
from kvmanager.core.block import Blocks
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.sequence import Sequence
from kvmanager.core.shares import TenantShares

_CHOICE = "lowest priority, then greatest load of a tenant, then latest arrival"


class PreemptionPolicy:
    """Orders preemptions, and no others before all of these are reported. It has no state of its own."""

    def preempt(self, state: LedgerState) -> tuple[Preempt, ...]:
        """Order as many preemptions as the stalled sequences need, when no block is left anywhere."""
        pool = state.block_pool
        if not state.stalled or state.running < 2 or state.preempting or pool.leased or pool.available:
            return ()
        stalled = state.live_stalled()
        if not stalled:
            return ()
        running = running_sequences(state)
        victims = victims_for(stalled, running, TenantShares(state), state.blocks)
        leaving = {victim.id for victim in victims}
        going_on = [each for each in stalled if each not in leaving] or stalled
        beneficiary = min((state.sequences[each] for each in going_on), key=seniority)
        return self._order_all(state, victims, beneficiary, running, ("pool is used up", _CHOICE))

    def preempt_for(self, state: LedgerState, sequence: Sequence, missing: Callable[[], int]) -> tuple[Preempt, ...]:
        """Order a preemption for a sequence that waits, if it is entitled to one that helps.

        `missing` returns the blocks that it lacks; it is called only when there is a victim.
        """
        if state.preempting or state.live_stalled():
            return ()
        running = running_sequences(state)
        blocks = state.config.admission_blocks(sequence.num_tokens)
        victims = self.victims(sequence, running, TenantShares(state), blocks)
        if not victims:
            return ()
        pool = state.blocks
        if missing() > sum(private_blocks(each, pool) for each in victims):
            return ()
        victim = victims[0]
        reason = "a higher priority waits" if victim.priority < sequence.priority else "a tenant below its share waits"
        return self._order_all(state, [victim], sequence, running, (reason, _CHOICE))

    def victims(self, sequence: Sequence, running: list[Sequence], shares: TenantShares, blocks: int) -> list[Sequence]:
        """Return those that a waiting sequence which needs so many blocks may replace, the first victim first."""
        senior = min((*running, sequence), key=seniority)
        within = not shares.running(sequence.tenant) or shares.load(sequence.tenant, 1, blocks) <= 1.0
        found = [
            each
            for each in running
            if each is not senior
            and (
                (each.priority < sequence.priority and not each.by_age)
                or (within and _gives_way(each, sequence, shares))
            )
        ]
        return sorted(found, key=lambda each: _exposure(each, shares), reverse=True)

    def _order_all(
        self,
        state: LedgerState,
        victims: list[Sequence],
        beneficiary: Sequence,
        running: list[Sequence],
        reasons: tuple[str, ...],
    ) -> tuple[Preempt, ...]:
        # The records of one order share their candidates: the first has them.
        named = candidates(running, state.blocks)
        shown = [named, *[()] * (len(victims) - 1)]
        records = [_record(state, each, beneficiary, reasons, of) for each, of in zip(victims, shown, strict=True)]
        orders = tuple(Preempt(each.id, record) for each, record in zip(victims, records, strict=True))
        for victim in victims:
            self.order(state, victim)
        return orders

    def order(self, state: LedgerState, victim: Sequence) -> None:
        """Mark the victim. Its blocks are not free before the worker reports that it released them."""
        state.halt(victim, SequencePhase.DRAINING_PREEMPT)


def private_blocks(sequence: Sequence, blocks: Blocks) -> int:
    """Return how many blocks of a block table no other sequence holds: the blocks that its preemption frees."""
    return sum(blocks.refs[block] == 1 for block in sequence.block_table if block != TRIMMED)


def tokens_lost(sequence: Sequence, blocks: Blocks, block_size: int) -> int:
    """Return how many tokens of a sequence must be computed again if its sealed blocks stay cached.

    The number goes into the decision record. It may be some tokens low, because the worker reports lengths only with
    what may cause a preemption, and not at every step (`Report.computed`).
    """
    sealed = sum(block == TRIMMED or blocks.hash[block] is not None for block in sequence.block_table)
    return max(0, max(sequence.num_tokens, sequence.computed) - sealed * block_size)


def seniority(sequence: Sequence) -> tuple[int, int]:
    """Return the key by which sequences are ordered, the most senior first."""
    return (-sequence.priority, sequence.arrival)


def running_sequences(state: LedgerState) -> list[Sequence]:
    return [each for each in state.sequences.values() if each.phase is SequencePhase.RUNNING]


def victims_for(
    stalled: Iterable[SequenceId], running: list[Sequence], shares: TenantShares, blocks: Blocks
) -> list[Sequence]:
    """Return victims, the first one first, until each stalled sequence that is not among them gets a block.

    One at least; the most senior one is none. Each victim is chosen by what the tenants hold without those before it.
    """
    senior = min(running, key=seniority)
    left = [each for each in running if each is not senior]
    needy, freed, victims = set(stalled), FreedBlocks(blocks), list[Sequence]()
    while left and (not victims or freed.count < len(needy)):
        victim = max(left, key=lambda each: _exposure(each, shares))
        left.remove(victim)
        shares.remove(victim)
        needy.discard(victim.id)
        freed.release(victim)
        victims.append(victim)
    return victims


class FreedBlocks:
    """The blocks that several sequences together free when they leave."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._dropped: Counter[BlockId] = Counter()
        self.count = 0

    def release(self, sequence: Sequence) -> None:
        for block in sequence.block_table:
            if block != TRIMMED:
                self._dropped[block] += 1
                self.count += self._dropped[block] == self._blocks.refs[block]


def _exposure(sequence: Sequence, shares: TenantShares) -> tuple[int, float, int]:
    """Return the key by which victims are chosen, the greatest first."""
    return (-sequence.priority, shares.load(sequence.tenant), sequence.arrival)


def _gives_way(victim: Sequence, sequence: Sequence, shares: TenantShares) -> bool:
    """Return whether a tenant over its share may lose a sequence, and is left with another one.

    The one that waits comes before the victim once that waits, too: else the victim would get its blocks back at once.
    """
    if victim.tenant == sequence.tenant or victim.priority > sequence.priority:
        return False
    if shares.load(victim.tenant) <= 1.0 or shares.running(victim.tenant) < 2:
        return False
    without = shares.load(victim.tenant, -1, -victim.own_blocks)
    return (shares.load(sequence.tenant), sequence.arrival) < (without, victim.arrival)


def candidates(running: Iterable[Sequence], blocks: Blocks) -> tuple[Candidate, ...]:
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


def _record(
    state: LedgerState,
    victim: Sequence,
    beneficiary: Sequence,
    reasons: tuple[str, ...],
    named: tuple[Candidate, ...],
) -> str:
    blocks = state.blocks
    figures = {
        "tokens_lost": float(tokens_lost(victim, blocks, state.config.block_size)),
        "blocks_freed": float(private_blocks(victim, blocks)),
        "stalled": float(len(state.live_stalled())),
        "running": float(state.running),
    }
    return state.decisions.preempted(victim, beneficiary, reasons, figures, named)
