"""Predicted utility: the leaf goes that is worth the least by its class and age.

The best of all leaves is not searched. Some leaves are picked at random, those of the least worth among them are kept
for the next choice, and the blocks before an evicted leaf follow it while they have its class and age. Where LRU would
find more (`recency_guard.py`), the oldest of them goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar, Final

from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.interface import Mark, no_leaf
from kvmanager.cache.eviction.recency_guard import RecencyGuard
from kvmanager.contracts.block import Blocks

MOST_USES: Final = 127
_USES: Final = (2, 4, 9, MOST_USES)
_ORIGINS: Final = (0, 2, 8, MOST_USES)
_PACES: Final = 12
CLASSES: Final = len(_ORIGINS) + len(_USES) * _PACES


# The classes of blocks whose reuse a policy learns apart.
# A block counts its uses. A new block that extends a chain whose last block ended a request inherits the count of
# that block: the next turn of a conversation is as likely as that of its earlier blocks. Any other new block begins
# at one. Blocks of one use are told apart by how often the block before them was used, the others by the mean time
# between uses.
def _steps(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(next(k for k, most in enumerate(bounds) if uses <= most) for uses in range(MOST_USES + 1))


_ORIGIN_OF: Final = _steps(_ORIGINS)
_USES_OF: Final = tuple(len(_ORIGINS) + step * _PACES for step in _steps(_USES))


def class_of(uses: int, origin: int, span: int) -> int:
    """Return the class of a block. `origin` counts the uses of the block before it when it was registered (0: none).

    `span` is the time between the first and the last use.
    """
    if uses == 1:
        return _ORIGIN_OF[origin]
    return _USES_OF[uses] + min(_PACES - 1, (span // (uses - 1)).bit_length() >> 1)


_ABSENT: Final = -1
_MASK = (1 << 64) - 1


# A set of blocks from which some can be picked at random, in O(1) each.
class LeafSet:
    """The blocks of an array without gaps, and the place of each. The picks are the same in every run."""

    __slots__ = ("_blocks", "_place", "_random")

    def __init__(self, num_blocks: int) -> None:
        self._blocks: list[BlockId] = []
        self._place = [_ABSENT] * num_blocks
        self._random = 1

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return self._place[block] != _ABSENT

    def add(self, block: BlockId) -> None:
        """Add a block that is not in the set."""
        self._place[block] = len(self._blocks)
        self._blocks.append(block)

    def remove(self, block: BlockId) -> None:
        """Remove a block of the set; the last one takes its place."""
        last = self._blocks.pop()
        if last != block:
            self._blocks[self._place[block]] = last
            self._place[last] = self._place[block]
        self._place[block] = _ABSENT

    def pick(self, count: int) -> list[BlockId]:
        """Return `count` blocks, some perhaps twice; all blocks when the set has no more than twice as many.

        The numbers come from Knuth's linear congruential generator for 64 bits.
        """
        blocks = self._blocks
        if len(blocks) <= 2 * count:
            return list(blocks)
        found, random = [], self._random
        for _ in range(count):
            random = (random * 6364136223846793005 + 1442695040888963407) & _MASK
            found.append(blocks[(random >> 33) % len(blocks)])
        self._random = random
        return found


_BUCKETS = 2 * 33
_DECAY = 0.9
_FLAT = 1.0
"""Blocks that are assumed to be used again in each bucket before anything was learned."""
_POOLED = 60.0
"""Blocks that are assumed to have the lifetimes of all classes together."""


# What a policy learns of reuse: after how long blocks of a class are used again, and what a block is worth by its
# age.
# The age of a block is the number of blocks that were released since it was. Ages fall into buckets of half an
# octave. A block that waits costs its place for so long; it pays when it is used again. The worth of a block of age
# a is the greatest ratio, over all later ages b, of the chance to be used between a and b to the expected wait
# until the use or b: the index of Gittins. To evict the block of the least worth is best when blocks are
# independent of each other.
def bucket_of(age: int) -> int:
    """Return the bucket of an age: two for each power of two, and the last for all that is older."""
    bits = age.bit_length()
    if bits < 2:
        return bits + 1
    bucket = 2 * bits + (age >> (bits - 2) & 1)
    return bucket if bucket < _BUCKETS else _BUCKETS - 1


def _first_age(bucket: int) -> int:
    bits, upper = divmod(bucket, 2)
    return (2 + upper) << (bits - 2) if bits > 1 else max(0, bucket - 1)


_FIRST = [_first_age(bucket) for bucket in range(_BUCKETS + 1)]


class Lifetimes:
    """Uses by class and age. `worth[klass][bucket]` is current after each `learn`.

    Callers add 1 to `evicted[klass]` for each block that was evicted, as one that is never used.
    """

    __slots__ = ("_reused", "evicted", "worth")

    def __init__(self, classes: int) -> None:
        self._reused = [[0.0] * _BUCKETS for _ in range(classes)]
        self.evicted = [0.0] * classes
        self.worth = [[0.0] * _BUCKETS for _ in range(classes)]
        self.learn()

    def reuse(self, klass: int, age: int) -> None:
        """Count a cached block that was used at this age."""
        self._reused[klass][bucket_of(age)] += 1.0

    def regret(self, klass: int, age: int) -> None:
        """Count an evicted block whose content was wanted at this age after all."""
        self.evicted[klass] -= 1.0
        self._reused[klass][bucket_of(age)] += 1.0

    def learn(self) -> None:
        """Compute the worth of all classes and ages anew, and let what was counted fade."""
        pooled = [_FLAT + sum(column) for column in zip(*self._reused, strict=True)]
        never = _FLAT + sum(self.evicted)
        weight = _POOLED / (never + sum(pooled))
        prior = [each * weight for each in pooled]
        unknown = _worths(prior, never * weight)
        for klass, reused in enumerate(self._reused):
            evicted = max(0.0, self.evicted[klass])
            if evicted + sum(reused) < 1.0:
                self.worth[klass] = unknown
                continue
            self.worth[klass] = _worths([a + b for a, b in zip(reused, prior, strict=True)], evicted + never * weight)
            self._reused[klass] = [each * _DECAY for each in reused]
            self.evicted[klass] = evicted * _DECAY


def _worths(reused: list[float], never: float) -> list[float]:
    """Return the worth by age: slopes of the concave hull over (place-time spent, uses) from each age on."""
    alive, spent, uses = sum(reused) + never, 0.0, 0.0
    points = []
    for bucket, count in enumerate(reused):
        points.append((spent, uses))
        width = _FIRST[bucket + 1] - _FIRST[bucket]
        spent += width * (alive - count / 2)
        alive -= count
        uses += count
    hull = [(spent, uses)]
    worths = [0.0] * len(reused)
    for bucket in range(len(points) - 1, -1, -1):
        x, y = points[bucket]
        while len(hull) > 1 and (hull[-2][1] - y) * (hull[-1][0] - x) >= (hull[-1][1] - y) * (hull[-2][0] - x):
            hull.pop()
        worths[bucket] = (hull[-1][1] - y) / (hull[-1][0] - x) if hull[-1][0] > x else 0.0
        hull.append((x, y))
    return worths


_PICKED: Final = 32
_KEPT: Final = 32
_FIRST_LESSON: Final = 256
_LESSON: Final = 4096


class PredictedUtility:
    """Time is counted in blocks that were released; all blocks of one release have one time.

    `uses` and `tip` are explained at `class_of`: a tip is the last block of a chain that nothing has extended.
    """

    __slots__ = (
        "_blocks", "_born", "_due", "_entries", "_follower", "_gone", "_guard", "_kept", "_klass", "_leaves",
        "_length", "_lifetimes", "_linked", "_now", "_origin", "_period", "_released", "_run", "_tip", "_uses",
        "withheld",
    )  # fmt: skip

    name: ClassVar[str] = "utility"

    @property
    def reason(self) -> str:
        if self._guard.by_age:
            return "the oldest of some leaves: in the last windows LRU would have found more"
        return "least likely to be used again soon, leaves first"

    def __init__(self, blocks: Blocks, entries: dict[BlockHash, BlockId], linked: bool = True) -> None:
        self._blocks, self._entries, self._linked = blocks, entries, linked
        self.withheld: Collection[BlockId] = ()
        self._lifetimes, self._guard = Lifetimes(CLASSES), RecencyGuard(len(blocks))
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
        self._guard.empty()

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: BlockId) -> bool:
        return self._released[block] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(number) for number, time in enumerate(self._released) if time != _ABSENT)

    # ------------------------------------------------------------ what happens to blocks

    def note_registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
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
        content = self._blocks.hash[block]
        if content and self._entries.get(content, block) == block:
            self._guard.note_missed(content)

    def note_used(self, block: BlockId) -> None:
        uses = self._uses[block]
        if uses < MOST_USES:
            self._uses[block] = uses + 1

    def forget_content(self, content: BlockHash) -> None:
        self._guard.note_dropped(content)

    def add_block(self, block: BlockId) -> None:
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
        if content := self._blocks.hash[block]:
            self._guard.note_released(content, self._length)

    def restore_blocks(self, blocks: Iterable[BlockId]) -> None:
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

    def reuse_block(self, block: BlockId) -> None:
        self._lifetimes.reuse(self._klass[block], self._now - self._released[block])
        self._remove_block(block)
        if content := self._blocks.hash[block]:
            self._guard.note_found(content)
        self.note_used(block)

    def discard_block(self, block: BlockId) -> None:
        if content := self._blocks.hash[block]:
            self._guard.note_dropped(content)
        self._remove_block(block)

    def _remove_block(self, block: BlockId) -> None:
        if block in self._leaves:
            self._leaves.remove(block)
        if block == self._follower:
            self._follower = None
        self._released[block] = _ABSENT
        self._length -= 1

    def replace_block(self, old: BlockId, by: BlockId) -> None:
        self._uses[by], self._born[by] = self._uses[old], self._born[old]
        if content := self._blocks.hash[by]:
            self._guard.note_dropped(content)
        self._remove_block(old)

    # ------------------------------------------------------------ eviction

    def pop_block(self) -> BlockId:
        if not self._length:
            raise IndexError("nothing is cached")
        number = self._least() if self._follower is None else self._follower
        self._leaves.remove(number)
        # What `pop_withheld` does: a call more for each block would show.
        self._gone = self._released[number]
        self._released[number] = _ABSENT
        self._length -= 1
        self._lifetimes.evicted[self._klass[number]] += 1.0
        self._follower = self._expose(number)
        return number

    def withhold_block(self, block: BlockId) -> None:
        if block in self._leaves:
            self._leaves.remove(block)
        if block == self._follower:
            self._follower = None

    def offer_block(self, block: BlockId) -> None:
        if not self._blocks.children[block]:
            self._leaves.add(block)

    def can_pop(self) -> bool:
        return bool(self._leaves)

    def pop_withheld(self, block: BlockId) -> None:
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
        if parent not in self._leaves:  # a frame is one still if its child was stored after it
            self._leaves.add(parent)
        return parent if released == self._gone and self._klass[parent] == self._klass[number] else None

    def _least(self) -> BlockId:
        """Return the leaf of the least worth, or the oldest, of those that were kept and some picked at random."""
        if self._now >= self._due:
            self._lifetimes.learn()
            self._due = self._now + min(self._now, self._period)
        self._guard.judge(self._now)
        leaves, classes, released = self._leaves, self._klass, self._released
        worths, now = self._lifetimes.worth, self._now
        picked = {each for each in self._kept if each in leaves}
        picked.update(leaves.pick(_PICKED))
        if not picked:
            raise no_leaf()
        if self._guard.by_age:
            ranked = sorted([(0.0, released[each], each) for each in picked])
        else:
            ranked = sorted(
                [(worths[classes[each]][bucket_of(now - released[each])], released[each], each) for each in picked]
            )
        self._kept = [each for _, _, each in ranked[1 : _KEPT + 1]]
        return ranked[0][2]

    def mark_of(self, block: BlockId) -> Mark:
        return self._klass[block], self._gone, self._uses[block], self._born[block]

    def explain_choice(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ("age", float(self._now - self._gone)), ("uses", float(self._uses[block]))

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        since = self._now + self._run - self._released[block] - 1
        return ("released_since", float(since)), ("uses", float(self._uses[block]))
