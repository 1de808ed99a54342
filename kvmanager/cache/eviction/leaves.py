"""A set of blocks from which some can be picked at random, in O(1) each."""

from __future__ import annotations

from common.contracts.types import BlockId

_ABSENT = -1
_MASK = (1 << 64) - 1


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
