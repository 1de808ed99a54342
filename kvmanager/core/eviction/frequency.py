"""By frequency, after S3-FIFO (Yang et al., SOSP 2023), on the leaves of the cached prefixes.

New blocks stand in a small queue of about a tenth of the cached blocks. A block that is used again there moves to the
main queue, any other one is evicted. In the main queue each use gives a block another round, three at most. Content
that comes back soon after its eviction goes to the main queue at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar, Final

from common.types import BlockHash, BlockId
from kvmanager.core.block import Block
from kvmanager.core.eviction.interface import Mark, no_leaf
from kvmanager.core.prefix_cache import Entry

_SMALL_SHARE: Final = 10
_ROUNDS: Final = 3
_EVICTED: Final[Mark] = (1,)


class Frequency:
    """Queues of leaves; a block that is no leaf waits for the eviction of its last child outside of them."""

    __slots__ = (
        "_entries",
        "_entry",
        "_is_main",
        "_length",
        "_main",
        "_num_blocks",
        "_rounds",
        "_small",
        "_small_length",
    )

    name: ClassVar[str] = "frequency"
    reason: ClassVar[str] = "used least often, leaves first"

    def __init__(self, num_blocks: int, entries: dict[BlockHash, Entry]) -> None:
        self._num_blocks, self._entries = num_blocks, entries
        self.empty()

    def empty(self) -> None:
        count = self._num_blocks
        self._small: OrderedDict[BlockId, None] = OrderedDict()
        self._main: OrderedDict[BlockId, None] = OrderedDict()
        self._entry: list[Entry | None] = [None] * count
        self._rounds, self._is_main = [0] * count, [False] * count
        # Cached blocks, and those of them that belong to the small queue, whether they are leaves or not.
        self._length = self._small_length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: BlockId) -> bool:
        return self._entry[block] is not None

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(number) for number, entry in enumerate(self._entry) if entry is not None)

    # ------------------------------------------------------------ what happens to blocks

    def registered(self, block: Block, parent: BlockId | None, mark: Mark) -> None:
        self._rounds[block.id], self._is_main[block.id] = 0, bool(mark)

    def used(self, block: Block) -> None:
        if self._rounds[block.id] < _ROUNDS:
            self._rounds[block.id] += 1

    def add(self, block: Block) -> None:
        assert block.hash is not None
        entry = self._entry[block.id] = self._entries[block.hash]
        if not entry.children:
            self._queue(block.id)[block.id] = None
        self._length += 1
        self._small_length += not self._is_main[block.id]

    def take(self, block: Block) -> None:
        self.discard(block)
        self.used(block)

    def discard(self, block: Block) -> None:
        self._queue(block.id).pop(block.id, None)
        self._leave(block.id)

    def replaced(self, old: Block, by: Block) -> None:
        self._rounds[by.id], self._is_main[by.id] = self._rounds[old.id], self._is_main[old.id]
        self.discard(old)

    def _queue(self, block: BlockId) -> OrderedDict[BlockId, None]:
        return self._main if self._is_main[block] else self._small

    def _leave(self, block: BlockId) -> None:
        self._entry[block] = None
        self._length -= 1
        self._small_length -= not self._is_main[block]

    # ------------------------------------------------------------ eviction

    def pop(self) -> BlockId:
        if not self._length:
            raise IndexError("nothing is cached")
        if not self._small and not self._main:
            raise no_leaf()
        while True:
            is_small = bool(self._small) and (not self._main or self._small_length * _SMALL_SHARE > self._length)
            block, _ = (self._small if is_small else self._main).popitem(last=False)
            if not self._rounds[block]:
                break
            self._rounds[block] -= 1
            if is_small:
                self._small_length -= 1
                self._is_main[block] = True
            self._main[block] = None
        entry = self._entry[block]
        assert entry is not None
        self._leave(block)
        self._expose(entry)
        return block

    def _expose(self, entry: Entry) -> None:
        """Put the block before a popped one at the head of its queue, if that was its last child."""
        above = self._entries.get(entry.parent)
        if above is not None and above.children == 1 and self._entry[above.blocks[0]] is not None:
            queue = self._queue(above.blocks[0])
            queue[above.blocks[0]] = None
            queue.move_to_end(above.blocks[0], last=False)

    def mark_of(self, block: BlockId) -> Mark:
        return () if self._is_main[block] else _EVICTED

    def why(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return (("main_queue", float(self._is_main[block])),)

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ("uses", float(self._rounds[block])), *self.why(block)
