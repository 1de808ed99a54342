"""Which waiting sequences may pass the one that is next and lacks blocks: those that do not delay it.

This is EASY backfilling (Lifka 1995) with steps in place of seconds. A running sequence takes part in each step, and
every report has the number of the last one. A sequence has ended at the latest when it has `max_len` tokens. So there
is a step by which the next sequence has its blocks. One that will have ended by then may pass, and so may one whose
blocks are left over then. What passes never lets the pool run out before its own end: it causes no preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from common.types import SequencePhase
from kvmanager.core.sequence import Sequence

PROMPT_TOKENS: Final = 256
"""Tokens of a prompt that count as one step: few, since a step is shared."""
CANDIDATES: Final = 8
"""Sequences behind the next one that are looked at: each report pays for them."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence that holds blocks: its steps to come, its blocks, and those that it may still bind.

    `room` is the number of tokens that its last block still takes. Shared blocks count for their first sequence.
    """

    steps: int
    blocks: int
    growth: int
    room: int

    @staticmethod
    def of(sequence: Sequence, now: int, block_size: int) -> Holder:
        elapsed = now - sequence.started_at
        known = max(sequence.computed, sequence.num_tokens + max(0, elapsed - _prompt_steps(sequence)))
        room = len(sequence.block_table) * block_size - min(known, sequence.max_len)
        return Holder(max(0, steps_of(sequence) - elapsed), sequence.own_blocks, sequence.growth, room)

    def grown(self, steps: int, block_size: int) -> int:
        """Return how many blocks it will have bound after so many steps."""
        return max(0, min(self.growth, -((self.room - steps) // block_size)))


@dataclass(frozen=True, slots=True)
class Reservation:
    """By which step the next sequence has its blocks, and how many are left beside it then."""

    steps: int
    spare: int


def steps_of(sequence: Sequence) -> int:
    """Return the steps after its admission by which a sequence has ended at the latest."""
    return _prompt_steps(sequence) + sequence.max_len - sequence.num_tokens


def _prompt_steps(sequence: Sequence) -> int:
    return -(-sequence.num_tokens // PROMPT_TOKENS)


def running_holders(sequences: Iterable[Sequence], now: int, block_size: int) -> list[Holder]:
    """Return those that run at step `now`, the first to end first."""
    found = (each for each in sequences if each.phase is SequencePhase.RUNNING)
    return sorted((Holder.of(each, now, block_size) for each in found), key=lambda each: each.steps)


def reservation(holders: list[Holder], missing: int, block_size: int, ahead: int) -> Reservation | None:
    """Return when a sequence that lacks so many blocks has them; `holders` are in the order of their ends.

    Those that still run then have leased blocks for `ahead` tokens more. None where the others do not free enough. A
    later end can leave less than an earlier one, because others grow. So the search by halves finds one end that
    suffices, not always the first.
    """
    released = [0, *accumulate(each.blocks for each in holders)]

    def left_at(index: int) -> int:
        steps = holders[index].steps + ahead
        grown = sum(each.grown(steps, block_size) for each in holders[index + 1 :])
        return released[index + 1] - grown - missing

    low, high = 0, len(holders) - 1
    if high < 0 or left_at(high) < 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if left_at(middle) >= 0 else (middle + 1, high)
    return Reservation(holders[low].steps, left_at(low))


class Passing:
    """The sequences that may pass at one moment. `granted` tells it of each one that did."""

    def __init__(self, holders: list[Holder], reserved: Reservation, block_size: int) -> None:
        self._holders, self._block_size = holders, block_size
        self._steps, self._spare = reserved.steps, reserved.spare

    def may_pass(self, sequence: Sequence, available: int) -> bool:
        """Whether a sequence delays nobody, without any hit. `available` blocks are free or cached."""
        steps, blocks = steps_of(sequence), sequence.max_blocks
        if blocks > available or (steps > self._steps and blocks > self._spare):
            return False
        return blocks + sum(each.grown(steps, self._block_size) for each in self._holders) <= available

    def granted(self, sequence: Sequence, now: int) -> None:
        if steps_of(sequence) > self._steps:
            self._spare -= sequence.max_blocks
        self._holders.append(Holder.of(sequence, now, self._block_size))


def behind(waiting: Iterator[Sequence], head: Sequence) -> Iterator[Sequence]:
    """Return the first few that wait behind the next sequence."""
    for count, sequence in enumerate(waiting):
        if count > CANDIDATES:
            return
        if sequence is not head:
            yield sequence
