"""Predicted utility: the leaf goes that is worth the least by its class and age (`classes.py`, `lifetimes.py`).

The best of all leaves is not searched. Some leaves are picked at random, those of the least worth among them are kept
for the next choice, and the blocks before an evicted leaf follow it while they have its class and age.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar, Final

from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.classes import CLASSES, MOST_USES, class_of
from kvmanager.cache.eviction.interface import Mark, no_leaf
from kvmanager.cache.eviction.leaves import LeafSet
from kvmanager.cache.eviction.lifetimes import Lifetimes, bucket_of
from kvmanager.contracts.block import Blocks

_PICKED: Final = 32
_KEPT: Final = 32
_FIRST_LESSON: Final = 256
_LESSON: Final = 4096
_ABSENT: Final = -1


class PredictedUtility:
    """Time is counted in blocks that were released; all blocks of one release have one time.

    `uses` and `tip` are explained in `classes.py`: a tip is the last block of a chain that nothing has extended.
    """

    __slots__ = (
        "_blocks", "_born", "_due", "_entries", "_follower", "_gone", "_kept", "_klass", "_leaves", "_length",
        "_lifetimes", "_linked", "_now", "_origin", "_period", "_released", "_run", "_tip", "_uses", "withheld",
    )  # fmt: skip

    name: ClassVar[str] = "utility"
    reason: ClassVar[str] = "least likely to be used again soon, leaves first"

    def __init__(self, blocks: Blocks, entries: dict[BlockHash, BlockId], linked: bool = True) -> None:
        self._blocks, self._entries, self._linked = blocks, entries, linked
        self.withheld: Collection[BlockId] = ()
        self._lifetimes = Lifetimes(CLASSES)
        self._now = self._run = self._gone = 0
        self._period, self._due = max(_LESSON, len(blocks) // 2), _FIRST_LESSON
        self.empty()

    def empty(self) -> None:
        count = len(self._blocks)
        # Small numbers take a byte each, so that fewer lines of a processor's cache hold what a block needs.
        self._uses, self._tip = bytearray(b"\1") * count, bytearray(count)
        self._origin, self._klass = bytearray(count), bytearray(count)
        self._born, self._released = [0] * count, [_ABSENT] * count
        self._leaves, self._kept = LeafSet(count), list[BlockId]()
        self._follower: BlockId | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: BlockId) -> bool:
        return self._released[block] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(number) for number, time in enumerate(self._released) if time != _ABSENT)

    # ------------------------------------------------------------ what happens to blocks

    def registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
        uses, origin, born = 1, 0, self._now
        if parent is not None:
            if self._tip[parent]:
                self._tip[parent] = False
                uses, origin, born = self._uses[parent], self._origin[parent], self._born[parent]
            else:
                origin = self._uses[parent]
        if mark:
            klass, released, before, then = mark
            self._lifetimes.regret(klass, self._now - released)
            if before >= uses:
                uses, born = min(before + 1, MOST_USES), then
        self._uses[block], self._origin[block], self._born[block] = uses, origin, born
        self._tip[block] = True

    def used(self, block: BlockId) -> None:
        uses = self._uses[block]
        if uses < MOST_USES:
            self._uses[block] = uses + 1

    def add(self, block: BlockId) -> None:
        if self._blocks.children[block]:
            self._tip[block] = False
        else:  # the release of another block table begins
            self._now += self._run
            self._run = 0
            self._leaves.add(block)
        self._klass[block] = class_of(self._uses[block], self._origin[block], self._now - self._born[block])
        self._released[block] = self._now
        self._run += 1
        self._length += 1

    def restore(self, blocks: Iterable[BlockId]) -> None:
        # Nothing is known of their uses: they keep the class and the tip of a block that is new.
        children, leaves, released = self._blocks.children, self._leaves, self._released
        now, run, length = self._now, self._run, 0
        for block in blocks:
            if not children[block]:
                now, run = now + run, 0
                leaves.add(block)
            released[block] = now
            run += 1
            length += 1
        self._now, self._run = now, run
        self._length += length

    def take(self, block: BlockId) -> None:
        self._lifetimes.reuse(self._klass[block], self._now - self._released[block])
        self.discard(block)
        self.used(block)

    def discard(self, block: BlockId) -> None:
        if block in self._leaves:
            self._leaves.remove(block)
        if block == self._follower:
            self._follower = None
        self._released[block] = _ABSENT
        self._length -= 1

    def replaced(self, old: BlockId, by: BlockId) -> None:
        self._uses[by], self._born[by] = self._uses[old], self._born[old]
        self.discard(old)

    # ------------------------------------------------------------ eviction

    def pop(self) -> BlockId:
        if not self._length:
            raise IndexError("nothing is cached")
        number = self._least() if self._follower is None else self._follower
        self._leaves.remove(number)
        # What `evict` does: a call more for each block would show.
        self._gone = self._released[number]
        self._released[number] = _ABSENT
        self._length -= 1
        self._lifetimes.evicted[self._klass[number]] += 1.0
        self._follower = self._expose(number)
        return number

    def withhold(self, block: BlockId) -> None:
        if block in self._leaves:
            self._leaves.remove(block)
        if block == self._follower:
            self._follower = None

    def offer(self, block: BlockId) -> None:
        if not self._blocks.children[block]:
            self._leaves.add(block)

    def can_pop(self) -> bool:
        return bool(self._leaves)

    def evict(self, block: BlockId) -> None:
        self._gone = self._released[block]
        self._released[block] = _ABSENT
        self._length -= 1
        self._lifetimes.evicted[self._klass[block]] += 1.0
        self._follower = self._expose(block)

    def _expose(self, number: BlockId) -> BlockId | None:
        """Make a leaf of the block before a popped one, if that was its last child; return it if it goes next."""
        over = self._blocks.parent[number]
        parent = self._entries.get(over) if over else None
        if parent is None or self._blocks.children[parent] > 1:
            return None
        released = self._released[parent]
        if released == _ABSENT or parent in self.withheld:
            return None
        if not self._linked:
            # It is a leaf already. One run of blocks goes before another one loses a block: a gap costs the whole run.
            old = released <= self._gone + 1
            return parent if old and parent in self._leaves and self._klass[parent] == self._klass[number] else None
        self._leaves.add(parent)
        return parent if released == self._gone and self._klass[parent] == self._klass[number] else None

    def _least(self) -> BlockId:
        """Return the leaf of the least worth among those that were kept and some that are picked at random."""
        if self._now >= self._due:
            self._lifetimes.learn()
            self._due = self._now + min(self._now, self._period)
        leaves, classes, released = self._leaves, self._klass, self._released
        worths, now = self._lifetimes.worth, self._now
        picked = {each for each in self._kept if each in leaves}
        picked.update(leaves.pick(_PICKED))
        if not picked:
            raise no_leaf()
        ranked = sorted(
            [(worths[classes[each]][bucket_of(now - released[each])], released[each], each) for each in picked]
        )
        self._kept = [each for _, _, each in ranked[1 : _KEPT + 1]]
        return ranked[0][2]

    def mark_of(self, block: BlockId) -> Mark:
        return self._klass[block], self._gone, self._uses[block], self._born[block]

    def why(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ("age", float(self._now - self._gone)), ("uses", float(self._uses[block]))

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        since = self._now + self._run - self._released[block] - 1
        return ("released_since", float(since)), ("uses", float(self._uses[block]))
