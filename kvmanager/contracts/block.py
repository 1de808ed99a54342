"""The blocks of a worker's pool, in the manager's view."""

from __future__ import annotations

from enum import Enum

from common.contracts.types import BlockHash, BlockId, SequenceId

ROOT = BlockHash(b"")
"""The parent hash of a first block."""

NOBODY = SequenceId(-1)


class BlockState(Enum):
    """Every block is in exactly one state. A block IN_USE is registered if it has a hash.

    Where the pool has groups, a PART is a further page of the block of another page.
    """

    FREE = "free"
    LEASED = "leased"
    IN_USE = "in_use"
    CACHED = "cached"
    PART = "part"


# Python looks an enum's member up anew at each use, which shows where it is done for each block.
FREE, LEASED, IN_USE, CACHED = BlockState.FREE, BlockState.LEASED, BlockState.IN_USE, BlockState.CACHED
PART = BlockState.PART


class Blocks:
    """State, references and content of all blocks: a column for each property, with the block's id as its index.

    A pool may have a million blocks. Columns are made at once, and a block without an object of its own takes a third
    of the memory.

    `hash` is set while the block is registered in the prefix cache. `pending` is the hash that the block will have,
    while others may share it before it is sealed. `awaited` counts the admissions for which a block was a hit by then,
    and which are to be counted once it is sealed. `index` is its place in every block table that holds it. `parent` is
    the hash of the block before it, if the prompt's block hashes contain it, or once the block is registered. Otherwise
    `parent` is None, and `owner`, the only holder, gets that hash when the block before is sealed. `children` counts
    the registered hashes whose parent is the hash of this block; only the first copy of a hash counts them.

    Where the pool has groups, a block is named by its first page, and `others` has its further ones. `group` is that of
    a block. The `hash` of a block behind the first group is a key (`key_of`), and its parent is the first group's block
    of the same content: that one must stay while this one does.
    """

    __slots__ = (
        "awaited",
        "children",
        "group",
        "hash",
        "index",
        "others",
        "owner",
        "parent",
        "pending",
        "refs",
        "state",
    )

    def __init__(self, num_blocks: int) -> None:
        self.state = [BlockState.FREE] * num_blocks
        self.clear()

    def __len__(self) -> int:
        return len(self.state)

    def clear(self) -> None:
        """Make every block a free one without content."""
        count = len(self.state)
        self.state = [BlockState.FREE] * count
        self.refs, self.index, self.children = [0] * count, [0] * count, [0] * count
        self.hash: list[BlockHash | None] = [None] * count
        self.pending: list[BlockHash | None] = [None] * count
        self.parent: list[BlockHash | None] = [None] * count
        self.owner = [NOBODY] * count
        self.awaited: dict[BlockId, int] = {}
        self.group = bytearray(count)
        self.others: dict[BlockId, tuple[BlockId, ...]] = {}

    def pages_of(self, block: BlockId) -> int:
        """Return how many pages a block has."""
        return 1 + len(self.others.get(block, ()))
