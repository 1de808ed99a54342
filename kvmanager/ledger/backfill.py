"""Decides which waiting sequences may pass the next one while it lacks blocks.

This is EASY backfilling (Lifka 1995) with steps in place of seconds. A running sequence takes part in each step, and
every report has the number of the last one. A sequence has ended at the latest when it has `max_len` tokens. So there
is a step by which the next sequence has its blocks. Until then a sequence may pass that will have ended by then, or
whose blocks are left over then. All that can be bound until its own end must be there when it passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final, NamedTuple

from common.contracts.types import TRIMMED, BlockId, SequenceId, SequencePhase
from kvmanager.contracts.sequence import Sequence

PROMPT_TOKENS: Final = 256
"""Tokens of a prompt that count as one step. Low, because several prompts share a step."""
CANDIDATES: Final = 8
"""Sequences behind the next one that are looked at, because each report pays for them."""
_LOOKED_THROUGH: Final = 64
_LEAST_PAUSE: Final = 16


class Holder(NamedTuple):
    """A running sequence: its steps to come, the blocks that its end releases, and those that it may still bind.

    `room` is the number of tokens that its last block still takes, at least.
    """

    steps: int
    released: int
    growth: int
    room: int

    def grown(self, steps: int, block_size: int) -> int:
        """Return how many blocks it will have bound after so many steps, at most."""
        return max(0, min(self.growth, -((self.room - steps) // block_size)))


class Growth:
    """How many blocks those that run may have bound after so many steps, for the candidates of one report.

    The running sequences are looked through once, and for a number of steps only where a number that was counted
    before does not decide: more steps bind no fewer blocks.
    """

    __slots__ = ("_block_size", "_counted", "_grows")

    def __init__(self, runs: Iterable[Sequence], now: int, block_size: int) -> None:
        holders = (holder_of(each, now, block_size) for each in runs)
        self._grows = [(each.growth, each.room) for each in holders if each.growth > 0]
        self._block_size = block_size
        self._counted: dict[int, int] = {}

    def add_sequence(self, sequence: Sequence, now: int) -> None:
        """Count one sequence more: it has just been admitted."""
        holder = holder_of(sequence, now, self._block_size)
        if holder.growth > 0:
            self._grows.append((holder.growth, holder.room))
            self._counted.clear()

    def fits_blocks(self, steps: int, room: int) -> bool:
        """Return whether at most `room` blocks are bound after so many steps."""
        if room < 0:
            return False
        for counted, blocks in self._counted.items():
            if counted >= steps and blocks <= room:
                return True
            if counted <= steps and blocks > room:
                return False
        found = self._counted[steps] = self.blocks_after(steps)
        return found <= room

    def blocks_after(self, steps: int) -> int:
        """Return how many blocks may be bound after so many steps."""
        size = self._block_size
        return sum([min(growth, (steps - room + size - 1) // size) for growth, room in self._grows if steps > room])


def growth_beside(head: Sequence, sequences: Iterable[Sequence], now: int, block_size: int) -> Growth:
    """Return the growth of those that run beside one that waits, or that runs and lacks blocks of its prompt."""
    return Growth((each for each in running(sequences) if each is not head), now, block_size)


@dataclass(slots=True)
class Reservation:
    """What the next sequence was promised at step `made_at`: its blocks by step `until`, with `spare` ones left then.

    `until` is None where those that run do not release enough. It is never put off for the same sequence.
    """

    sequence: SequenceId
    made_at: int
    until: int | None = None
    spare: int = 0
    pause: int = _LEAST_PAUSE

    def is_over(self, now: int) -> bool:
        """Return whether nobody may pass any more."""
        return self.until is not None and now >= self.until

    def is_due(self, now: int) -> bool:
        """Return whether it is to be made anew: sequences may have ended before their greatest length."""
        return now - self.made_at >= self.pause

    def admits(self, sequence: Sequence, now: int) -> bool:
        """Return whether a sequence that starts now keeps the promise."""
        if self.until is None:
            return False
        return now + steps_of(sequence) <= self.until or sequence.max_blocks <= self.spare

    def count_passed(self, sequence: Sequence, now: int) -> None:
        """Count a sequence that has passed."""
        if self.until is not None and now + steps_of(sequence) > self.until:
            self.spare -= sequence.max_blocks


def steps_of(sequence: Sequence) -> int:
    """Return the steps after its admission by which a sequence has ended."""
    return -(-sequence.num_tokens // PROMPT_TOKENS) + sequence.max_len - sequence.num_tokens


def holder_of(sequence: Sequence, now: int, block_size: int, released: int = 0) -> Holder:
    """Return a running sequence as of step `now`."""
    elapsed = now - sequence.started_at
    known = min(sequence.num_tokens + elapsed, sequence.max_len)
    room = len(sequence.block_table) * block_size - known
    return Holder(max(0, steps_of(sequence) - elapsed), released, sequence.growth, room)


def running(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [each for each in sequences if each.phase is SequencePhase.RUNNING]


def holders_of(found: list[Sequence], refs: list[int], kept: Collection[BlockId], now: int, size: int) -> list[Holder]:
    """Return running sequences, the first to end first; `refs` are the references of all blocks.

    A shared block is released at the last end among those that hold it. `kept` are the hits of the next sequence,
    which it needs besides.
    """
    left: dict[BlockId, int] = {}
    holders = []
    for sequence in sorted(found, key=lambda each: steps_of(each) + each.started_at):
        released = 0
        for block in sequence.block_table:
            if block == TRIMMED or block in kept:
                continue
            count = refs[block]
            if count > 1:
                count = left[block] = left.get(block, count) - 1
                released += not count
            else:
                released += 1
        holders.append(holder_of(sequence, now, size, released))
    return holders


def reserved(holders: list[Holder], missing: int, block_size: int, ahead: int) -> tuple[int, int] | None:
    """Return after how many steps a sequence that lacks so many blocks has them, and how many are left then.

    `holders` are in the order of their ends. Those that still run then have leased blocks for `ahead` tokens more. None
    where the others do not release enough. A later end can leave less than an earlier one, because others grow. So the
    search by halves finds one end that suffices, not always the first.
    """
    released = [0, *accumulate(each.released for each in holders)]

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
    return holders[low].steps, left_at(low)


def renewed(
    old: Reservation | None, head: Sequence, growth: int, found: tuple[int, int] | None, now: int, in_use: int
) -> Reservation:
    """Return the reservation of the next sequence, which may bind `growth` blocks after its admission.

    A pool with more blocks in use is looked through less often.
    """
    new = Reservation(head.id, now, old.until if old is not None else None, pause=max(_LEAST_PAUSE, in_use // 256))
    if found is not None:
        until = now + found[0]
        new.until = until if new.until is None else min(new.until, until)
        new.spare = max(0, found[1] - growth)
    return new


def candidates_behind(waiting: Iterator[Sequence], head: Sequence, available: int) -> list[Sequence]:
    """Return the first few that wait behind the next sequence and fit into what is there.

    None has a lower priority: the next sequence could be entitled to its blocks.
    """
    found = (
        each
        for each in islice(waiting, _LOOKED_THROUGH)
        if each is not head and each.priority >= head.priority and each.max_blocks <= available
    )
    return list(islice(found, CANDIDATES))
