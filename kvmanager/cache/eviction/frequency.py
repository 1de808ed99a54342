"""By frequency, after S3-FIFO (Yang et al., SOSP 2023), on the leaves of the cached prefixes.

New blocks stand in a small queue of about a tenth of the cached blocks. A block that is used again there moves to the
main queue, any other one is evicted. In the main queue each use gives a block another round, three at most. Content
that comes back soon after its eviction goes to the main queue at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar, Final

from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.interface import Mark, no_leaf
from kvmanager.contracts.block import Blocks

_SMALL_SHARE: Final = 10
_ROUNDS: Final = 3
_EVICTED: Final[Mark] = (1,)


class Frequency:
    """Queues of leaves; a block that is no leaf waits for the eviction of its last child outside of them."""

    __slots__ = (
        "_blocks",
        "_cached",
        "_entries",
        "_is_main",
        "_length",
        "_main",
        "_rounds",
        "_small",
        "_small_length",
        "withheld",
    )

    name: ClassVar[str] = "frequency"
    reason: ClassVar[str] = "used least often, leaves first"

    def __init__(self, blocks: Blocks, entries: dict[BlockHash, BlockId], linked: bool = True) -> None:
        # Where hashes are not linked, every block is a leaf: the eviction of one makes no other one a leaf.
        self._blocks, self._entries = blocks, entries if linked else {}
        self.withheld: Collection[BlockId] = ()
        self.empty()

    def empty(self) -> None:
        count = len(self._blocks)
        self._small: OrderedDict[BlockId, None] = OrderedDict()
        self._main: OrderedDict[BlockId, None] = OrderedDict()
        self._cached = [False] * count
        self._rounds, self._is_main = [0] * count, [False] * count
        # Cached blocks, and those of them that belong to the small queue, whether they are leaves or not.
        self._length = self._small_length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: BlockId) -> bool:
        return self._cached[block]

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(number) for number, cached in enumerate(self._cached) if cached)

    # ------------------------------------------------------------ what happens to blocks

    def note_registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
        self._rounds[block], self._is_main[block] = 0, bool(mark)

    def note_used(self, block: BlockId) -> None:
        if self._rounds[block] < _ROUNDS:
            self._rounds[block] += 1

    def forget_content(self, content: BlockHash) -> None:
        """Change nothing: what has gone is not remembered here."""

    def add_block(self, block: BlockId) -> None:
        self._cached[block] = True
        if not self._blocks.children[block]:
            self._queue(block)[block] = None
        self._length += 1
        self._small_length += not self._is_main[block]

    def restore_blocks(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.add_block(block)

    def reuse_block(self, block: BlockId) -> None:
        self.discard_block(block)
        self.note_used(block)

    def discard_block(self, block: BlockId) -> None:
        self._queue(block).pop(block, None)
        self._leave(block)

    def replace_block(self, old: BlockId, by: BlockId) -> None:
        self._rounds[by], self._is_main[by] = self._rounds[old], self._is_main[old]
        self.discard_block(old)

    def _queue(self, block: BlockId) -> OrderedDict[BlockId, None]:
        return self._main if self._is_main[block] else self._small

    def _leave(self, block: BlockId) -> None:
        self._cached[block] = False
        self._length -= 1
        self._small_length -= not self._is_main[block]

    # ------------------------------------------------------------ eviction

    def pop_block(self) -> BlockId:
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
        self._leave(block)
        self._expose(block)
        return block

    def _expose(self, block: BlockId) -> None:
        """Put the block before a popped one at the head of its queue, if that was its last child."""
        parent = self._blocks.parent[block]
        above = self._entries.get(parent) if parent else None
        if above is not None and self._blocks.children[above] == 1 and self._cached[above]:
            self._put_first(above)

    def _put_first(self, block: BlockId) -> None:
        if block not in self.withheld:
            queue = self._queue(block)
            queue[block] = None
            queue.move_to_end(block, last=False)

    def withhold_block(self, block: BlockId) -> None:
        self._queue(block).pop(block, None)

    def offer_block(self, block: BlockId) -> None:
        """Put a leaf at the head of its queue: it has waited longer than the others there."""
        if not self._blocks.children[block]:
            self._put_first(block)

    def can_pop(self) -> bool:
        return bool(self._small or self._main)

    def pop_withheld(self, block: BlockId) -> None:
        self._leave(block)
        self._expose(block)

    def mark_of(self, block: BlockId) -> Mark:
        return () if self._is_main[block] else _EVICTED

    def explain_choice(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return (("main_queue", float(self._is_main[block])),)

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        return ("uses", float(self._rounds[block])), *self.explain_choice(block)
