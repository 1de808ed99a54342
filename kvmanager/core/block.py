"""One block of a worker's pool, as its manager sees it."""

from __future__ import annotations

from enum import Enum

from common.types import BlockHash, BlockId, SequenceId

ROOT = BlockHash(b"")
"""Stands for the parent of a chain's first block."""

NOBODY = SequenceId(-1)


class BlockState(Enum):
    """Every block is in exactly one state; ROW is shown apart as registered (it has a hash) or not."""

    FREE = "free"
    LEASED = "leased"
    IN_USE = "in_use"
    CACHED = "cached"


class Block:
    """State, references and content claim of one block.

    `hash` is set while the block is registered in the prefix cache, `pending` while it is the one that others may
    share before it is sealed. `index` is its place in every row that holds it. `parent` is the hash of the block
    before it where the chain of the prompt tells; else None, and the chain of `owner`, its only holder, tells once
    that block is sealed.
    """

    __slots__ = ("hash", "id", "index", "owner", "parent", "pending", "refs", "state")

    def __init__(self, block: BlockId) -> None:
        self.id = block
        self.state = BlockState.FREE
        self.refs = 0
        self.hash: BlockHash | None = None
        self.pending: BlockHash | None = None
        self.parent: BlockHash | None = None
        self.owner: SequenceId = NOBODY
        self.index = 0
