"""What a policy of eviction knows and decides.

The registered hashes of a worker form a forest. The map stays closed under prefixes only if a hash leaves after all its
children. So a policy evicts leaves alone: cached blocks whose hash has no registered child. A child of a cached block
is cached too, because a block table that holds a child holds a copy of the parent. So there is a leaf while there is a
cached block.

Where every layer of the model has a window, hashes are not linked: no block counts children, so each one is a leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar, Final, Protocol

from common.contracts.errors import ProtocolViolation
from common.contracts.types import BlockHash, BlockId

Mark = tuple[int, ...]
"""What a policy remembers of an evicted hash until it is registered again, or forgotten; empty: nothing."""

NO_MARK: Final[Mark] = ()


def no_leaf() -> ProtocolViolation:
    """Return the error of a ledger whose cached blocks all have children: the worker's inventory has said so."""
    return ProtocolViolation("each cached block is the parent of a block in use that was registered without it")


class EvictionOrder(Protocol):
    """The cached blocks of one worker. Each method takes O(1) or O(log n), amortised over the blocks.

    `name` is that of the option, `reason` goes into the record of an eviction. `withheld` are cached blocks that
    `pop_block` passes over (`retention.py` keeps them); the blocks before them are no leaves.
    """

    name: ClassVar[str]
    withheld: Collection[BlockId]

    @property
    def reason(self) -> str: ...

    def add_block(self, block: BlockId) -> None:
        """Take a registered block that no block table holds any more. Children are added before their parents."""
        ...

    def restore_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Take the blocks of an inventory that no block table holds, the next to be evicted first.

        That is what `add_block` does to each of them; a million of them must not take long.
        """
        ...

    def reuse_block(self, block: BlockId) -> None:
        """Let a cached block go that is used again."""
        ...

    def discard_block(self, block: BlockId) -> None:
        """Let a cached block go that is freed, although not for room."""
        ...

    def replace_block(self, old: BlockId, by: BlockId) -> None:
        """Let a cached block go because the block `by`, which is in use, has its content."""
        ...

    def empty(self) -> None:
        """Forget all blocks, because the ledger is rebuilt; what was learned of reuse is kept."""
        ...

    def pop_block(self) -> BlockId:
        """Let the next leaf go, whose content is then forgotten. Raises IndexError when nothing is cached.

        Raises ProtocolViolation when there is no leaf: then the inventory of the worker contradicted itself.
        """
        ...

    def withhold_block(self, block: BlockId) -> None:
        """Note that a cached block is withheld from now on."""
        ...

    def offer_block(self, block: BlockId) -> None:
        """Note that a cached block is withheld no more. It stands where it would have stood all the time."""
        ...

    def can_pop(self) -> bool:
        """Return whether there is a leaf that is not withheld."""
        ...

    def pop_withheld(self, block: BlockId) -> None:
        """Let a withheld leaf go, as if `pop_block` had chosen it."""
        ...

    def note_registered(self, block: BlockId, parent: BlockId | None, mark: Mark) -> None:
        """Note that a block in use got its hash. `parent` is a block with the content before it; None: there is none.

        `mark` is what `mark_of` said when this content was evicted, if that is not long ago.
        """
        ...

    def note_used(self, block: BlockId) -> None:
        """Note that one more block table holds a block in use."""
        ...

    def forget_content(self, content: BlockHash) -> None:
        """Note that an evicted content is at hand elsewhere: it may come back although nobody has missed it."""
        ...

    def mark_of(self, block: BlockId) -> Mark:
        """Return what to remember of a block that has just been popped."""
        ...

    def explain_choice(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        """Return the figures by which a popped block was chosen, for its record."""
        ...

    def known_of(self, block: BlockId) -> tuple[tuple[str, float], ...]:
        """Return what is known about the use of a cached block, for operators; it may take O(n)."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate over the cached blocks; with `lru` in the order of their eviction."""
        ...

    def __contains__(self, block: BlockId) -> bool: ...
