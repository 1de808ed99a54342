"""The order of `kvmanager/ledger/grant_order.py` written a second time, to check what a ledger granted.

It looks at a ledger before a batch, and at what was granted. It uses none of the ledger's policies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.contracts.lease import held_blocks
from common.contracts.types import TRIMMED, Decision, DecisionKind, SequenceId, SequencePhase, ShortfallReason
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.ledger import Ledger


class OrderBroken(Exception):
    """A sequence was admitted although another one came first."""


@dataclass(slots=True)
class _Before:
    """What waited before a batch; `begun` runs with a part of its prompt's blocks, and may be old and outranked."""

    waiting: list[Sequence]
    old: set[SequenceId]
    stalled: list[str]
    begun: Sequence | None
    takes_turn: bool


class OrderCheck:
    """Follows one ledger from its first batch on. It counts the turns by itself."""

    def __init__(self, ledger: Ledger) -> None:
        self._state = ledger.state
        self._in_turn = 0
        self.by_age = self.passed = 0
        self.before()

    def before(self) -> None:
        """Look at the ledger before it decides on a batch."""
        state = self._state
        running = [each for each in state.sequences.live.values() if each.phase is SequencePhase.RUNNING]
        begun = next((each for each in running if each.id == state.sequences.partial and self._lacks(each)), None)
        stalled = [each.name for each in running if each.id in state.sequences.stalled and each is not begun]
        waiting = [state.sequences.live[each] for each in state.sequences.queue]
        old = {each.id for each in (*waiting, begun) if each is not None and self._is_old(each)}
        takes_turn = (
            begun is not None
            and begun.id in old
            and not begun.by_age
            and self._in_turn >= state.config.in_turn
            and any(each.priority > begun.priority for each in waiting)
        )
        self._before = _Before(waiting, old, stalled, begun, takes_turn)

    def after(self, decisions: Iterable[Decision]) -> None:
        """Check what a batch granted. Raises OrderBroken."""
        before = self._before
        if before.takes_turn and before.begun is not None:
            if not before.begun.by_age:
                raise OrderBroken(f"{before.begun.name} is old, and a higher priority takes its turn")
            self._in_turn = 0
        for each in decisions:
            if each.kind is DecisionKind.GRANT:
                sequence = self._find(each)
                self._check(sequence, bool(dict(each.figures).get("passes")))
                before.waiting.remove(sequence)
            elif ShortfallReason.CHECKPOINT in each.reasons:
                before.waiting.remove(self._find(each))  # others pass it while it waits

    def _find(self, decision: Decision) -> Sequence:
        return next(each for each in self._before.waiting if each.name == decision.request_id)

    def _check(self, sequence: Sequence, passes: bool) -> None:
        before, begun = self._before, self._before.begun
        if before.stalled:
            raise OrderBroken(f"{sequence.name} was admitted while {before.stalled} are stalled")
        if passes:
            self.passed += 1
            return
        if begun is not None and begun.phase is SequencePhase.RUNNING and (lacks := self._lacks(begun)):
            outranks = sequence.priority > begun.priority and not begun.by_age
            if not outranks and self._state.store.pool.leased < lacks:
                raise OrderBroken(f"{sequence.name} was admitted before {begun.name}, which lacks {lacks} blocks")
        self._check_turn(sequence)
        self._in_turn = 0 if sequence.by_age else self._in_turn + 1

    def _check_turn(self, sequence: Sequence) -> None:
        """Check the order of those that wait. Which tenant is next depends on what they hold: that is not repeated."""
        waiting = self._before.waiting
        old = [each for each in waiting if each.id in self._before.old]
        turn_by_age = bool(old) and self._in_turn >= self._state.config.in_turn
        if sequence.by_age and not (turn_by_age and sequence in old):
            raise OrderBroken(f"{sequence.name} was admitted by age, and it was not its turn")
        self.by_age += sequence.by_age
        one_tenant = len({each.tenant for each in self._state.sequences.live.values()}) < 2
        if sequence.by_age or (turn_by_age and one_tenant):
            first = min((each for each in old if each.tenant == sequence.tenant), key=_by_arrival, default=None)
        else:
            highest = max(each.priority for each in waiting)
            lines = [each for each in waiting if each.priority == highest and each.tenant == sequence.tenant]
            first = min(lines, key=_by_arrival, default=None)
        if sequence is not first:
            name = first.name if first is not None else "a higher priority"
            raise OrderBroken(f"{sequence.name} was admitted before {name}; the turn by age: {turn_by_age}")

    def _lacks(self, sequence: Sequence) -> int:
        return count_lacking(self._state.config, sequence)

    def _is_old(self, sequence: Sequence) -> bool:
        longest = self._state.config.max_wait
        return longest > 0 and sequence.waited + self._state.clock.monotonic() - sequence.queued_at >= longest


def _by_arrival(sequence: Sequence) -> tuple[int, int]:
    return (sequence.arrival, sequence.id)


def count_lacking(config: LedgerConfig, sequence: Sequence) -> int:
    """Return the blocks, or pages, between what a prompt holds and what it holds at once when it is computed."""
    places = sequence.lacking(config.block_size)
    if not config.groups or not places:
        return places
    whole, pages = len(sequence.block_table) + places, config.groups[0].pages * places
    for group, run in zip(config.groups[1:], sequence.runs, strict=True):
        held = sum(block != TRIMMED for block in run.table)
        most = held_blocks(group, sequence.max_blocks, config.block_size)
        pages += 0 if run.checkpoints else group.pages * max(0, min(whole, most) - held)
    return pages
