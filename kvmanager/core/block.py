"""One block of a worker's pool, in the manager's view."""

from __future__ import annotations

from enum import Enum

from common.types import BlockHash, BlockId, SequenceId

ROOT = BlockHash(b"")
"""The parent hash of a first block."""

NOBODY = SequenceId(-1)


class BlockState(Enum):
    """Every block is in exactly one state. A block IN_USE is registered if it has a hash."""

    FREE = "free"
    LEASED = "leased"
    IN_USE = "in_use"
    CACHED = "cached"


class Block:
    """State, references and content of one block.

    `hash` is set while the block is registered in the prefix cache. `pending` is the hash that the block will have,
    while others may share it before it is sealed. `awaited` counts the admissions for which it was a hit by then, and
    which are to be counted once it is sealed. `index` is its place in every block table that holds it. `parent` is
    the hash of the block before it, if the prompt's block hashes contain it. Otherwise `parent` is None, and `owner`,
    the only holder, gets that hash when the block before is sealed.
    """

    __slots__ = ("awaited", "hash", "id", "index", "owner", "parent", "pending", "refs", "state")

    def __init__(self, block: BlockId) -> None:
        self.id = block
        self.state = BlockState.FREE
        self.refs = 0
        self.hash: BlockHash | None = None
        self.pending: BlockHash | None = None
        self.awaited = 0
        self.parent: BlockHash | None = None
        self.owner: SequenceId = NOBODY
        self.index = 0
