"""The preemption policy: which sequences lose their blocks when the pool is used up, or for whom else.

The victim has the lowest priority, then the tenant of the greatest load, then the least work to lose (`VictimOrder`
"work") or the latest arrival ("arrival"). The most senior sequence is never a victim, so it ends, and then another one
is the most senior: every sequence ends. No other preemption is ordered before all of one order are reported.

A sequence that was preempted `max_preemptions` times is spared: only a higher priority may preempt it again. It is
admitted with all blocks that it may ever need, so it never lacks one, and those that do wait for its end at most. Where
layers have windows its blocks come as it goes on; there it is the last to be chosen, by arrival.

A sequence that waits for admission is entitled to preemptions in two cases. Its priority is higher than the victims'.
Or its tenant is within its share with it, the victim's tenant is over its share, and one of that tenant's sequences
goes on. With the victim, that tenant would be over its share again, so the two never take turns.
"""

from __future__ import annotations

from bisect import bisect_right as bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from common.contracts.lease import HOST_REASON, Preempt
from common.contracts.types import TRIMMED, BlockId, Candidate, SequenceId, SequencePhase
from kvmanager.contracts.block import Blocks
from kvmanager.contracts.ledger_config import VictimOrder
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.grant_order import outranks
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.sequence_table import SequenceTable
from kvmanager.ledger.shares import TenantShares

_CHOICES: Final[dict[VictimOrder, str]] = {
    "work": "lowest priority, then greatest load of a tenant, then least work to lose",
    "arrival": "lowest priority, then greatest load of a tenant, then latest arrival",
}


class Shortage(NamedTuple):
    """What a waiting sequence lacks beside its `hits`, the blocks that it would share with others.

    Of the `missing` blocks, `slack` ones are for the growth of sequences that run beside it. Where the pool has groups,
    both are numbers of pages.
    """

    missing: int
    slack: int = 0
    hits: frozenset[BlockId] = frozenset()


def preempt_for_stalled(state: LedgerState) -> tuple[Preempt, ...]:
    """Order as many preemptions as the stalled sequences need, when no block is left anywhere.

    The blocks are for the most senior one that is stalled and stays, or else for the most senior one that stays:
    the first victims may have been those that stalled.
    """
    pool = state.store.pool
    if (
        not state.sequences.stalled
        or state.sequences.running < 2
        or state.sequences.preempting
        or pool.leased + pool.available >= state.config.stall_pages
    ):
        return ()
    stalled = state.sequences.find_stalled()
    if not stalled:
        return ()
    running = running_sequences(state.sequences)
    victims = victims_for(stalled, running, Exposure(state))
    if not victims:
        return ()
    leaving = {victim.id for victim in victims}
    staying = sorted((each for each in running if each.id not in leaving), key=seniority)
    beneficiary = next((each for each in staying if each.id in stalled), staying[0])
    return _order_preemptions(state, victims, beneficiary, running, "pool is used up")


def preempt_for_waiting(
    state: LedgerState, sequence: Sequence, shortage: Callable[[], Shortage]
) -> tuple[Preempt, ...]:
    """Order as many preemptions as a sequence that waits needs, if it is entitled to enough of them.

    `shortage` is called only when there is a victim.
    """
    if state.sequences.preempting or state.sequences.find_stalled():
        return ()
    running, exposure = running_sequences(state.sequences), Exposure(state)
    blocks = state.config.admission_blocks(sequence.num_tokens)
    entitled = entitled_victims(sequence, running, exposure, blocks)
    if not entitled:
        return ()
    short = shortage()
    freed, victims = FreedBlocks(state.store.blocks, short.hits), list[Sequence]()
    for each in entitled:
        if victims and freed.count >= short.missing:
            break
        if victims and not may_replace(sequence, each, exposure, blocks):
            continue  # those before it have left its tenant within its share
        exposure.shares.remove_sequence(each)
        freed.release_sequence(each)
        victims.append(each)
    # Where nobody stays, nobody grows, and the worker returns its lease pool.
    unneeded = short.slack + state.store.pool.leased if len(victims) == len(running) else 0
    if freed.count < short.missing - unneeded:
        return ()
    victims = needed_of(victims, freed, short.missing)
    higher = victims[0].priority < sequence.priority
    reason = "a higher priority waits" if higher else "a tenant below its share waits"
    return _order_preemptions(state, victims, sequence, running, reason)


def preempt_to_break_stall(state: LedgerState, lacking: list[Sequence], why: str) -> tuple[Preempt, ...]:
    """Order the preemption of one of those that lack blocks: the begun prompt, or else the first victim of all."""
    running, begun = running_sequences(state.sequences), state.sequences.find_begun_prompt()
    victim = begun if begun is not None and begun in lacking else max(lacking, key=Exposure(state).key_of)
    others = [each for each in state.sequences.live.values() if each is not victim]
    gaining = min((each for each in others if each in lacking or each.phase is SequencePhase.WAITING),
                  key=seniority, default=None)  # fmt: skip
    victim.gave_up = True
    return _order_preemptions(state, [victim], gaining, running, why)


def entitled_victims(sequence: Sequence, running: list[Sequence], exposure: Exposure, blocks: int) -> list[Sequence]:
    """Return those that a waiting sequence which needs so many blocks may replace, the first victim first."""
    senior = min((*running, sequence), key=seniority)
    found = [each for each in running if each is not senior and may_replace(sequence, each, exposure, blocks)]
    return sorted(found, key=exposure.key_of, reverse=True)


def may_replace(sequence: Sequence, victim: Sequence, exposure: Exposure, blocks: int) -> bool:
    """Return whether a waiting sequence which needs so many blocks is entitled to those of a running one."""
    if outranks(sequence, victim):
        return True
    shares = exposure.shares
    within = not shares.count_running(sequence.tenant) or shares.load_of(sequence.tenant, 1, blocks) <= 1.0
    return within and not exposure.is_spared(victim) and _gives_way(victim, sequence, shares)


def _order_preemptions(
    state: LedgerState,
    victims: list[Sequence],
    beneficiary: Sequence | None,
    running: list[Sequence],
    reason: str,
) -> tuple[Preempt, ...]:
    # The records of one order share their candidates: the first has them.
    named, reasons = candidates(running, state), (reason, _CHOICES[state.config.preemption])
    shown = [named, *[()] * (len(victims) - 1)]
    records = [_record(state, each, beneficiary, reasons, of) for each, of in zip(victims, shown, strict=True)]
    orders = tuple(Preempt(each.id, record) for each, record in zip(victims, records, strict=True))
    for victim in victims:
        order_preemption(state, victim)
    return orders


def order_preemption(state: LedgerState, victim: Sequence) -> None:
    """Mark the victim. Its blocks are not free before the worker reports that it released them."""
    state.sequences.halt_sequence(victim, SequencePhase.DRAINING_PREEMPT)


def private_blocks(sequence: Sequence, blocks: Blocks) -> int:
    """Return how many blocks, or pages, no other sequence holds: those that a sequence's preemption frees."""
    return sum(blocks.pages_of(block) for block in sequence.held_blocks() if blocks.refs[block] == 1)


def work_lost(sequence: Sequence, blocks: Blocks, block_size: int) -> int:
    """Return how many tokens of a sequence must be computed again at most: all that no other sequence holds.

    The pool is used up when somebody is preempted, so sealed blocks that nobody holds will soon be evicted. Blocks are
    shared, and sealed, from the first one on. Where nothing is sealed the worker's last report of the length counts.
    """
    table, size = sequence.block_table, block_size
    sealed = bisect(table, False, key=lambda block: block != TRIMMED and blocks.hash[block] is None)
    shared = bisect(table, False, key=lambda block: block == TRIMMED or blocks.refs[block] < 2)
    return max(0, min(max(sequence.computed, sealed * size), len(table) * size) - shared * size)


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


def running_sequences(sequences: SequenceTable) -> list[Sequence]:
    return [each for each in sequences.live.values() if each.phase is SequencePhase.RUNNING]


def victims_for(stalled: Collection[SequenceId], running: list[Sequence], exposure: Exposure) -> list[Sequence]:
    """Return victims, the first one first, until each stalled sequence that is not among them gets a block.

    One at least, unless all others are spared; the most senior one is none. Each victim is chosen by what the tenants
    hold without those before it.
    """
    senior, needy, victims = min(running, key=seniority), set(stalled), list[Sequence]()
    highest = max(each.priority for each in running if each.id in needy)
    left = [each for each in running if each is not senior]
    left = [each for each in left if each.priority < highest or not exposure.is_spared(each)]
    freed, each_lacks = FreedBlocks(exposure.blocks), exposure.stall_pages
    while left and (not victims or freed.count < len(needy) * each_lacks):
        victim = max(left, key=exposure.key_of)
        left.remove(victim)
        exposure.shares.remove_sequence(victim)
        needy.discard(victim.id)
        freed.release_sequence(victim)
        victims.append(victim)
    return needed_of(victims, freed, len(needy) * each_lacks, frozenset(stalled), each_lacks)


def needed_of(
    victims: list[Sequence],
    freed: FreedBlocks,
    lacking: int,
    stalled: Collection[SequenceId] = (),
    each_lacks: int = 1,
) -> list[Sequence]:
    """Return the victims without those that need not leave, because the others free all blocks that are lacking.

    One that is stalled and stays lacks `each_lacks` blocks, too. The last victim is needed.
    """
    kept = victims[-1:]
    for victim in reversed(victims[:-1]):
        freed.take_back_sequence(victim)
        lacks = lacking + each_lacks * (victim.id in stalled)
        if freed.count >= lacks:
            lacking = lacks
        else:
            freed.release_sequence(victim)
            kept.append(victim)
    return kept[::-1]


class FreedBlocks:
    """The blocks that several sequences together free when they leave, without those that another one shares then.

    `count` is that of pages where the pool has groups.
    """

    def __init__(self, blocks: Blocks, shared: Collection[BlockId] = ()) -> None:
        self._blocks, self._shared = blocks, shared
        self._dropped: Counter[BlockId] = Counter()
        self.count = 0

    def release_sequence(self, sequence: Sequence) -> None:
        for block in self._own(sequence):
            self._dropped[block] += 1
            if self._dropped[block] == self._blocks.refs[block]:
                self.count += self._blocks.pages_of(block)

    def take_back_sequence(self, sequence: Sequence) -> None:
        """Undo the release of a sequence."""
        for block in self._own(sequence):
            if self._dropped[block] == self._blocks.refs[block]:
                self.count -= self._blocks.pages_of(block)
            self._dropped[block] -= 1

    def _own(self, sequence: Sequence) -> Iterable[BlockId]:
        return (block for block in sequence.held_blocks() if block not in self._shared)


class Exposure:
    """The order of victims at one moment; `shares` are without those that were chosen before."""

    def __init__(self, state: LedgerState) -> None:
        self.shares, self.blocks = TenantShares(state.config, state.sequences.tenants), state.store.blocks
        self._config = state.config
        self.stall_pages = state.config.stall_pages
        # By sequence: work does not change while victims are chosen.
        self._work: dict[SequenceId, int] = {}

    def key_of(self, sequence: Sequence) -> tuple[int, float, bool, int, int]:
        """Return the key by which victims are chosen, the greatest first."""
        bounded = self.is_bounded(sequence)
        work = 0 if bounded or self._config.preemption != "work" else -self._work_of(sequence)
        return (-sequence.priority, self.shares.load_of(sequence.tenant), not bounded, work, sequence.arrival)

    def is_spared(self, sequence: Sequence) -> bool:
        """Return whether no sequence of the same priority may preempt this one."""
        return self.is_bounded(sequence) and not self._config.slides

    def is_bounded(self, sequence: Sequence) -> bool:
        """Return whether a sequence was preempted as often as it may be."""
        return sequence.preemptions >= self._config.max_preemptions > 0

    def _work_of(self, sequence: Sequence) -> int:
        work = self._work.get(sequence.id)
        if work is None:
            work = self._work[sequence.id] = work_lost(sequence, self.blocks, self._config.block_size)
        return work


def _gives_way(victim: Sequence, sequence: Sequence, shares: TenantShares) -> bool:
    """Return whether a tenant over its share may lose a sequence, and is left with another one.

    The one that waits comes before the victim once that waits, too: else the victim would get its blocks back at once.
    """
    if victim.tenant == sequence.tenant or victim.priority > sequence.priority:
        return False
    if shares.load_of(victim.tenant) <= 1.0 or shares.count_running(victim.tenant) < 2:
        return False
    without = shares.load_of(victim.tenant, -1, -victim.own_blocks)
    return (shares.load_of(sequence.tenant), sequence.arrival) < (without, victim.arrival)


def candidates(running: Iterable[Sequence], state: LedgerState) -> tuple[Candidate, ...]:
    """Return every running sequence with the terms of the choice, the first to be preempted first."""
    blocks, size, exposure = state.store.blocks, state.config.block_size, Exposure(state)
    found = []
    for sequence in sorted(running, key=exposure.key_of, reverse=True):
        terms = (
            ("priority", float(sequence.priority)),
            ("arrival", float(sequence.arrival)),
            ("private_blocks", float(private_blocks(sequence, blocks))),
            ("num_tokens", float(sequence.num_tokens)),
            ("work_lost", float(work_lost(sequence, blocks, size))),
            ("preemptions", float(sequence.preemptions)),
        )
        found.append(Candidate(sequence.name, terms=terms))
    return tuple(found)


def _record(
    state: LedgerState,
    victim: Sequence,
    beneficiary: Sequence | None,
    reasons: tuple[str, ...],
    named: tuple[Candidate, ...],
) -> str:
    blocks, size = state.store.blocks, state.config.block_size
    lost, work = tokens_lost(victim, blocks, size), work_lost(victim, blocks, size)
    kept = state.config.frames // state.config.stall_pages
    loadable = min(max(0, work - lost), kept * size)
    if loadable:
        what = f"the sealed blocks of {loadable} tokens go to frames if they are evicted, and are loaded again"
        reasons = (*reasons, f"{HOST_REASON}{what}")
    figures = {
        "tokens_lost": float(lost),
        "work_lost": float(work),
        **({"loadable_tokens": float(loadable)} if loadable else {}),
        "blocks_freed": float(private_blocks(victim, blocks)),
        "stalled": float(len(state.sequences.find_stalled())),
        "running": float(state.sequences.running),
    }
    return state.decisions.record_preemption(victim, beneficiary, reasons, figures, named)
