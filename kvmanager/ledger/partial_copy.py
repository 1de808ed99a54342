"""Copy-on-write of a part of a cached block, where a prompt diverges inside that block.

A copy of the whole block costs far less than the computation of a quarter of its slots: decision 0011 has the figures.
So every part that has a hash is copied. The sequence computes its last known token itself, for the logits.

The copy's source is held until the worker has reported the copy, or until a sequence lacks blocks. So a copy takes
nothing from anybody. Its parent is the last shared block, which the sequence holds, so a child in use never outlives
its parent.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from common.contracts.hashing import PARTIAL_HASHES, PARTIAL_PARTS
from common.contracts.types import BlockHash, BlockId
from kvmanager.contracts.block import ROOT, BlockState
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.block_store import BlockStore


@dataclass(frozen=True, slots=True)
class PartialCopy:
    """The leading `slots` of a registered block, for the block behind the shared ones."""

    source: BlockId
    slots: int


def partial_copy(store: BlockStore, sequence: Sequence, hits: Items[BlockId], spare: int) -> PartialCopy | None:
    """Return the copy that saves a sequence the most tokens behind its hits; None without one of a quarter of a block.

        prompt    | hit | hit | hit | a a a b b b |     source    | a a a c c c |, cached
        granted   | hit | hit | hit | a a a . . . |     `slots` = 3 are copied, the others are computed

    `spare` blocks are left beside those of the admission. A cached source is one of them: it must outlast the grant.
    """
    if not sequence.partial_hashes or not sequence.takes_hits or not store.config.copies_parts:
        return None
    index, size = len(hits), store.config.block_size
    room = sequence.num_tokens - 1 - index * size
    before = sequence.block_hashes[index - 1] if index else ROOT
    if room < size // PARTIAL_PARTS or (index and store.blocks.hash[hits[-1]] != before):
        return None
    found = _longest(store, sequence, index, before)
    if found is None or (store.blocks.state[found.source] is BlockState.CACHED and spare < 1):
        return None
    return PartialCopy(found.source, min(found.slots, room))


def _longest(store: BlockStore, sequence: Sequence, index: int, before: BlockHash) -> PartialCopy | None:
    """Return the block with the most leading slots in common; the whole one where only the last token hinders a hit."""
    size, first = store.config.block_size, PARTIAL_HASHES * index
    if index < len(sequence.block_hashes):
        block = store.cache.find_registered_block(sequence.block_hashes[index], before, index)
        if block is not None:
            return PartialCopy(block, size)
    found = store.cache.partials.find(sequence.partial_hashes[first : first + PARTIAL_HASHES])
    block = None if found is None else store.cache.find_registered_block(found[0], before, index)
    return None if found is None or block is None else PartialCopy(block, size // PARTIAL_PARTS * found[1])


def learn(store: BlockStore, sequence: Sequence, hits: Items[BlockId]) -> None:
    """Take the partial hashes of shared blocks from the sequence's own, where a rebuild forgot them."""
    known, partials = store.cache.partials.parts, sequence.partial_hashes
    if not partials or not store.config.copies_parts:
        return
    for index, block in enumerate(hits):
        content = store.blocks.hash[block]
        if content is not None and content not in known:
            parts = partials[PARTIAL_HASHES * index : PARTIAL_HASHES * (index + 1)]
            store.cache.partials.add(content, parts)
