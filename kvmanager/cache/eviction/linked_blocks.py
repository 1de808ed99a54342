"""An order of blocks in which any one leaves in O(1): a doubly linked list threaded through two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.contracts.types import BlockId

_ABSENT = -1


class LinkedBlocks:
    """First in, first out, with removal from the middle. Holds each of `num_blocks` block ids at most once.

    The links of block b are `_next[b]` and `_previous[b]`; index num_blocks is the sentinel that closes the ring.
    """

    __slots__ = ("_length", "_next", "_previous", "_sentinel")

    def __init__(self, num_blocks: int, blocks: Iterable[BlockId] = ()) -> None:
        self._sentinel = num_blocks
        self.empty()
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: BlockId) -> bool:
        return self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield BlockId(block)
            block = self._next[block]

    def empty(self) -> None:
        """Take out every block."""
        count = self._sentinel
        self._next, self._previous = [_ABSENT] * count + [count], [_ABSENT] * count + [count]
        self._length = 0

    def append(self, block: BlockId) -> None:
        """Put a block that is not in the list at its end. Raises ValueError when it is."""
        if self._next[block] != _ABSENT:
            raise ValueError(f"block {block} is in the list already")
        last = self._previous[self._sentinel]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = self._sentinel
        self._previous[self._sentinel] = block
        self._length += 1

    def remove(self, block: BlockId) -> None:
        """Take a block out, wherever it stands. Raises ValueError when it is not in the list."""
        after = self._next[block]
        if after == _ABSENT:
            raise ValueError(f"block {block} is not in the list")
        before = self._previous[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = _ABSENT
        self._length -= 1

    def popleft(self) -> BlockId:
        """Take the first block out. Raises IndexError when the list is empty."""
        if not self._length:
            raise IndexError("the list is empty")
        following, sentinel = self._next, self._sentinel
        block = following[sentinel]
        after = following[block]
        following[sentinel], self._previous[after] = after, sentinel
        following[block] = self._previous[block] = _ABSENT
        self._length -= 1
        return BlockId(block)
