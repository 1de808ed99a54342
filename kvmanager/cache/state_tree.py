"""Checkpoints by what goes on from them: which ones are superseded, and what tails are worth.

A chain of blocks has checkpoints at some of its boundaries, so checkpoints form a forest:

    system prompt ---- a chat's first prompt ---- its second one      superseded: the chat's first prompt
                \\---- another chat's prompt                           not: the system prompt, from which two go on

A checkpoint from which exactly one deeper one goes on, and that nobody asked for, is superseded: the chat goes on from
the deeper one. It leaves before every other content. So does a tail, the states behind the output of a sequence, if few
tails are used: the next turn of a chat goes on from there only if its template repeats the output as it was. And so
does K/V at the end of a chain that has no checkpoint at its end: no prompt can go on from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from common.contracts.types import BlockHash, BlockId
from kvmanager.contracts.block import CACHED, Blocks

_MOST_CREDIT: Final = 16
"""Used tails beyond unused ones, or the reverse, that count."""
_TRIES: Final = 16
"""Of so many tails that are not worth their room, one is given it, so that the manager notices a change."""
_SUPERSEDED: Final = "a deeper checkpoint goes on from it"
_ENDLESS: Final = "no checkpoint stands at or behind it"
_UNUSED: Final = "states behind an output, of which few are used"


class StateTree:
    """The registered checkpoints of one worker, by block hash. Methods take O(1), or O(checkpoints that go on)."""

    __slots__ = (
        "_above", "_asked", "_below", "_blocks", "_cached", "_counted", "_credit", "_early", "_ends", "_refused",
        "_tails", "group",
    )  # fmt: skip

    def __init__(self, group: int, blocks: Blocks) -> None:
        """`group` is that of checkpoints."""
        self.group, self._blocks = group, blocks
        self._credit = self._refused = 0
        self.clear()

    def clear(self) -> None:
        """Forget all checkpoints. What was learned of tails is kept."""
        self._above: dict[BlockHash, BlockHash | None] = {}
        self._below: dict[BlockHash, set[BlockHash]] = {}
        # How many of those below are no tails.
        self._counted: dict[BlockHash, int] = {}
        # Checkpoints that stay whatever goes on from them, and tails from which nothing went on yet.
        self._asked, self._tails = set[BlockHash](), set[BlockHash]()
        # The blocks of those that no sequence holds, and which of them are superseded, or tails.
        self._cached: dict[BlockHash, BlockId] = {}
        self._early: tuple[dict[BlockHash, None], dict[BlockHash, None]] = {}, {}
        # Cached blocks of K/V at the ends of chains; some may be none any more.
        self._ends: OrderedDict[BlockId, None] = OrderedDict()

    def copy(self, blocks: Blocks) -> StateTree:
        """Return an independent copy over other blocks."""
        twin = StateTree(self.group, blocks)
        twin._ends = self._ends.copy()
        twin._credit, twin._refused = self._credit, self._refused
        twin._above, twin._cached = self._above.copy(), self._cached.copy()
        twin._below = {state: below.copy() for state, below in self._below.items()}
        twin._counted = self._counted.copy()
        twin._asked, twin._tails = self._asked.copy(), self._tails.copy()
        twin._early = self._early[0].copy(), self._early[1].copy()
        return twin

    def key(self) -> tuple[object, ...]:
        """Return what decides which checkpoint leaves first, hashable."""
        early = tuple([tuple(each) for each in self._early])
        marks = frozenset(self._asked), frozenset(self._tails)
        return self._credit, self._refused, frozenset(self._above.items()), *marks, early, tuple(self._ends)

    def __contains__(self, state: BlockHash) -> bool:
        return state in self._above

    @property
    def known(self) -> set[BlockHash]:
        return set(self._above)

    @property
    def cached(self) -> dict[BlockHash, BlockId]:
        """The checkpoints that no sequence holds, and their blocks."""
        return self._cached

    # ------------------------------------------------------------ what goes on from what

    def add(self, state: BlockHash, above: BlockHash | None, asked: bool = False, tail: bool = False) -> None:
        """Add a checkpoint whose chain passes `above` last.

        One that is `asked` for, or where chains are known to part, is never superseded. A tail supersedes nothing
        before something goes on from it.
        """
        above = above if above in self._above else None
        self._above[state], self._below[state], self._counted[state] = above, set(), 0
        if above is not None:
            self._below[above].add(state)
        if asked:
            self._asked.add(state)
        if tail:
            self._tails.add(state)
        else:
            self._go_on(state)

    def _go_on(self, state: BlockHash) -> None:
        """Count a checkpoint as one that goes on from the one before it; a tail is none any more with that."""
        above = self._above[state]
        if above is not None:
            self._counted[above] += 1
            self._note_use(above)
            self._place(above)

    def _note_use(self, state: BlockHash) -> None:
        if state in self._tails:
            self._tails.remove(state)
            self._credit = min(self._credit + 1, _MOST_CREDIT)
            self._go_on(state)
            self._place(state)

    def remove(self, state: BlockHash) -> None:
        """Remove a checkpoint; those that go on from it go on from the one before it."""
        above, below, counted = self._above.pop(state), self._below.pop(state), self._counted.pop(state)
        self.note_held(state)
        self._asked.discard(state)
        was_tail = state in self._tails
        if was_tail:
            self._tails.remove(state)
            self._credit = max(self._credit - 1, -_MOST_CREDIT)
        for each in below:
            self._above[each] = above
        if above is not None:
            self._below[above].discard(state)
            self._below[above] |= below
            self._counted[above] += counted - (not was_tail)
            self._place(above)

    # ------------------------------------------------------------ what leaves first

    def note_cached(self, state: BlockHash, block: BlockId) -> None:
        """Note that no sequence holds a checkpoint any more."""
        self._cached[state] = block
        self._place(state)

    def note_end(self, block: BlockId, next_to_leave: bool = False) -> None:
        """Note that a cached block of K/V may be the end of a chain now."""
        self._ends[block] = None
        self._ends.move_to_end(block, last=not next_to_leave)

    def note_taken(self, state: BlockHash) -> None:
        """Note that a sequence holds a checkpoint, and goes on from it."""
        self.note_held(state)
        self._note_use(state)

    def note_held(self, state: BlockHash) -> None:
        """Note that a sequence holds a checkpoint: it has left the same states."""
        self._cached.pop(state, None)
        for early in self._early:
            early.pop(state, None)

    def _place(self, state: BlockHash) -> None:
        """Put a checkpoint among those that leave first, or take it out there."""
        cached, (superseded, tails) = state in self._cached, self._early
        for early, belongs in ((superseded, self.is_superseded(state)), (tails, state in self._tails)):
            if cached and belongs:
                early.setdefault(state)
            else:
                early.pop(state, None)

    def is_superseded(self, state: BlockHash) -> bool:
        return self._counted[state] == 1 and state not in self._asked

    def first_to_leave(self, keeps: Callable[[BlockId], bool]) -> tuple[BlockId, str] | None:
        """Return the cached block that leaves before all other contents, and why; None: there is none.

        Those are superseded checkpoints, then tails if these do not pay, then ends of chains, each in the order of
        their release. What the cache `keeps` stays.
        """
        superseded, tails = self._early
        for early, why in ((superseded, _SUPERSEDED), ({} if self.tails_pay else tails, _UNUSED)):
            for state in early:
                if not keeps(block := self._cached[state]):
                    return block, why
        while self._ends:
            block = next(iter(self._ends))
            if self._is_end(block) and not keeps(block):
                return block, _ENDLESS
            del self._ends[block]
        return None

    def _is_end(self, block: BlockId) -> bool:
        blocks = self._blocks
        return blocks.state[block] is CACHED and not blocks.group[block] and not blocks.children[block]

    def is_worth_keeping(self, state: BlockHash) -> bool:
        """Return whether a checkpoint is there that prompts are expected to go on from."""
        if state not in self._above or self.is_superseded(state):
            return False
        return self.tails_pay or state not in self._tails

    @property
    def tails_pay(self) -> bool:
        """Whether more tails of late were used than left unused."""
        return self._credit > 0

    def tail_takes_room(self) -> bool:
        """Return whether the next tail may take the room of other contents: where tails pay, and now and then.

        Call it once a tail.
        """
        if self.tails_pay:
            return True
        self._refused = (self._refused + 1) % _TRIES
        return not self._refused
