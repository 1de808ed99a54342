"""Decides which waiting sequences may pass the next one while it lacks blocks.

This is EASY backfilling (Lifka 1995) with steps in place of seconds. A running sequence takes part in each step, and
every report has the number of the last one. A sequence has ended at the latest when it has `max_len` tokens. So there
is a step by which the next sequence has its blocks. Until then a sequence may pass that will have ended by then, or
whose blocks are left over then. All that can be bound until its own end must be there when it passes.

Where layers have windows, a sequence binds blocks and releases others as it goes on. What counts is what it holds at
once. A chunk of a prompt may hold more, until its step has completed; that comes back within a few steps. Where the
pool has groups, all numbers of blocks are pages, but for those of one table.
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


class TableGrowth(NamedTuple):
    """A table whose blocks have `pages` pages: `growth` blocks may come to be held beside those that are.

    In all the sequence may still bind `bound` of them. `room` is the number of tokens that the last one still takes, at
    least; it is below 0 where the prompt goes on behind the table.
    """

    pages: int
    growth: int
    bound: int
    room: int


class Holder(NamedTuple):
    """A running sequence: its steps to come, the blocks that its end releases, and those that it may still hold.

    `room` is the number of tokens that its last block still takes, at least. Where the pool has groups, `growth` and
    `room` are those of the first one, whose blocks have `pages` pages, and `runs` has the other tables.
    """

    steps: int
    released: int
    growth: int
    room: int
    pages: int = 1
    runs: tuple[TableGrowth, ...] = ()

    def grown(self, steps: int, block_size: int) -> int:
        """Return how many blocks it will have bound after so many steps, at most."""
        grown = self.pages * max(0, min(self.growth, -((self.room - steps) // block_size)))
        if self.runs:
            grown += sum([_bound(run, run.growth, steps, block_size) for run in self.runs if steps > run.room])
        return grown


class Growth:
    """How many blocks those that run may have bound after so many steps, for the candidates of one report.

    The running sequences are looked through once, and for a number of steps only where a number that was counted
    before does not decide: more steps bind no fewer blocks.
    """

    __slots__ = ("_block_size", "_counted", "_grows", "_tables")

    def __init__(self, runs: Iterable[Sequence], now: int, block_size: int) -> None:
        self._block_size = block_size
        self._grows: list[tuple[int, int]] = []
        self._tables: list[TableGrowth] = []
        self._counted: dict[int, int] = {}
        for each in runs:
            self._add(holder_of(each, now, block_size))

    def add_sequence(self, sequence: Sequence, now: int) -> None:
        """Count one sequence more: it has just been admitted."""
        self._add(holder_of(sequence, now, self._block_size))
        self._counted.clear()

    def _add(self, holder: Holder) -> None:
        if holder.runs:
            self._tables += (TableGrowth(holder.pages, holder.growth, holder.growth, holder.room), *holder.runs)
        elif holder.growth > 0:
            self._grows.append((holder.growth, holder.room))

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
        """Return how many blocks may be held after so many steps, beside those that are."""
        size = self._block_size
        found = sum([min(growth, (steps - room + size - 1) // size) for growth, room in self._grows if steps > room])
        if self._tables:
            found += sum([_bound(each, each.growth, steps, size) for each in self._tables if steps > each.room])
        return found

    def bound_after(self, steps: int) -> int:
        """Return how many blocks may be bound within so many steps, those included that take the place of others."""
        if not self._tables:
            return self.blocks_after(steps)
        return sum([_bound(each, each.bound, steps, self._block_size) for each in self._tables if steps > each.room])


def _bound(table: TableGrowth, most: int, steps: int, block_size: int) -> int:
    """Return the pages that a table takes within so many steps, of `most` blocks."""
    return table.pages * min(most, (steps - table.room + block_size - 1) // block_size)


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

    def admits(self, sequence: Sequence, now: int, extra: int = 0) -> bool:
        """Return whether a sequence that starts now keeps the promise; it holds so many blocks beside its tokens'."""
        if self.until is None:
            return False
        return now + steps_of(sequence) <= self.until or sequence.most_held + extra <= self.spare

    def count_passed(self, sequence: Sequence, now: int, extra: int = 0) -> None:
        """Count a sequence that has passed."""
        if self.until is not None and now + steps_of(sequence) > self.until:
            self.spare -= sequence.most_held + extra


def steps_of(sequence: Sequence) -> int:
    """Return the steps after its admission by which a sequence has ended."""
    return -(-sequence.num_tokens // PROMPT_TOKENS) + sequence.max_len - sequence.num_tokens


def holder_of(sequence: Sequence, now: int, block_size: int, released: int = 0) -> Holder:
    """Return a running sequence as of step `now`."""
    elapsed = now - sequence.started_at
    known = min(sequence.num_tokens + elapsed, sequence.max_len)
    room = len(sequence.block_table) * block_size - known
    left = max(0, steps_of(sequence) - elapsed)
    if not sequence.runs:
        return Holder(left, released, sequence.net_growth, room)
    most = sequence.max_blocks
    runs = [
        TableGrowth(run.pages, run.net_growth(most), most - len(run.table), len(run.table) * block_size - known)
        for run in sequence.runs
        if not run.checkpoints
    ]
    return Holder(left, released, sequence.net_growth, room, sequence.block_pages, tuple(runs))


def running(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [each for each in sequences if each.phase is SequencePhase.RUNNING]


def holders_of(found: list[Sequence], refs: list[int], kept: Collection[BlockId], now: int, size: int) -> list[Holder]:
    """Return running sequences, the first to end first; `refs` are the references of all blocks.

    A shared block is released at the last end among those that hold it, or before. `kept` are the hits of the next
    sequence, which it needs besides.
    """
    left: dict[BlockId, int] = {}
    holders = []
    for sequence in sorted(found, key=lambda each: steps_of(each) + each.started_at):
        released = sequence.block_pages * _released(sequence.block_table, refs, kept, left)
        for run in sequence.runs:
            released += run.pages * _released(run.table, refs, kept, left)
        holders.append(holder_of(sequence, now, size, released))
    return holders


def _released(table: Iterable[BlockId], refs: list[int], kept: Collection[BlockId], left: dict[BlockId, int]) -> int:
    """Return how many blocks of a table nobody holds once its sequence has ended.

    `left` has the holders that shared blocks have then.
    """
    released = 0
    for block in table:
        if block == TRIMMED or block in kept:
            continue
        count = refs[block]
        if count > 1:
            count = left[block] = left.get(block, count) - 1
            released += not count
        else:
            released += 1
    return released


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
        if each is not head and each.priority >= head.priority and each.most_held <= available
    )
    return list(islice(found, CANDIDATES))
