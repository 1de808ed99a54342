"""Frozen views of a worker's blocks, for operators: how each of them is used, and everything about one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum

from common.contracts.hashing import hash_in
from common.contracts.types import BlockHash, BlockId, SequencePhase
from kvmanager.contracts.block import CACHED, FREE, IN_USE, LEASED, Blocks, BlockState
from kvmanager.contracts.counts import GroupCounts
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.sequence_table import SequenceTable


class BlockUse(IntEnum):
    """How a block is used; a byte of a block map is one of these numbers."""

    FREE = 1
    LEASED = 2
    FILLING = 3
    PENDING = 4
    SEALED = 5
    SHARED = 6
    CACHED = 7


@dataclass(frozen=True, slots=True)
class SequenceUse:
    """What one live sequence holds; `max_blocks` is what it would hold if it grew to its longest.

    `blocks` and `n_shared` count no places whose blocks left the window. Where the pool has groups, `blocks` and
    `max_blocks` count pages.
    """

    sequence: int
    request_id: str
    tenant: str
    phase: SequencePhase
    blocks: int
    n_shared: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A page of the pool from `first_block` on, a byte of `uses` a block; sequences with the most blocks come first.

    Where the pool has groups, there is a byte for each of its pages, and `groups` has those of their blocks.
    """

    num_blocks: int
    block_size: int
    first_block: int
    uses: bytes
    sequences: tuple[SequenceUse, ...]
    num_sequences: int
    groups: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block; `references` counts all block tables that hold it, and copies of it that have not run.

    `holders` are the first of the sequences of these block tables. Where the pool has groups, a block has `pages`.
    """

    block: BlockId
    use: BlockUse
    references: int
    index: int
    hash: BlockHash | None
    holders: tuple[SequenceUse, ...]
    figures: tuple[tuple[str, float], ...]
    group: int = 0
    pages: tuple[BlockId, ...] = ()


_NO_GROUP = 255
_APART = {BlockState.FREE: BlockUse.FREE, BlockState.LEASED: BlockUse.LEASED, BlockState.CACHED: BlockUse.CACHED}


def map_of(store: BlockStore, sequences: SequenceTable, first_block: int, limit: int, most_sequences: int) -> BlockMap:
    """Return the uses of `limit` blocks, and the sequences with the most blocks."""
    there = range(store.config.num_blocks)[first_block : first_block + limit]
    blocks = store.blocks
    first_of = {page: block for block, others in blocks.others.items() for page in others if page in there}
    named = [BlockId(first_of.get(BlockId(page), page)) for page in there]
    uses = bytes(use_of(blocks, block) for block in named)
    groups = b""
    if store.config.groups:
        groups = bytes(_NO_GROUP if blocks.state[each] in (FREE, LEASED) else blocks.group[each] for each in named)
    ordered = sorted(sequences.live.values(), key=lambda each: (-_num_blocks(each), each.arrival))
    config, greatest = store.config, tuple(_sequence(each, store.config) for each in ordered[:most_sequences])
    return BlockMap(config.num_blocks, config.block_size, first_block, uses, greatest, len(ordered), groups)


def uses_of_groups(store: BlockStore) -> tuple[GroupCounts, ...]:
    """Count the blocks of each group; it looks at each page."""
    counts = Counter(zip(store.blocks.state, store.blocks.group, strict=True))
    numbered = enumerate(store.config.groups)
    return tuple([GroupCounts(group, counts[IN_USE, number], counts[CACHED, number]) for number, group in numbered])


def view_of(store: BlockStore, sequences: SequenceTable, block_id: BlockId, most_holders: int) -> BlockView:
    """Return one block of the pool. A sequence that holds it has it at the block's own place in its block table.

    A page that is none's first is shown as the block that it is a part of.
    """
    blocks, holders = store.blocks, list[SequenceUse]()
    if blocks.state[block_id] is BlockState.PART:
        block_id = next(block for block, others in blocks.others.items() if block_id in others)
    refs, index = blocks.refs[block_id], blocks.index[block_id]
    if refs:
        held = (each for each in sequences.live.values() if each.holds(block_id, blocks.group[block_id], index))
        holders = [_sequence(each, store.config) for each, _ in zip(held, range(most_holders), strict=False)]
    figures = store.eviction.known_of(block_id) if blocks.state[block_id] is BlockState.CACHED else ()
    use = use_of(blocks, block_id)
    key, pages = blocks.hash[block_id], (block_id, *blocks.others.get(block_id, ()))
    found = BlockView(block_id, use, refs, index, key and hash_in(key), tuple(holders), figures)
    return replace(found, group=blocks.group[block_id], pages=pages) if store.config.groups else found


def use_of(blocks: Blocks, block: BlockId) -> BlockUse:
    if blocks.state[block] is not BlockState.IN_USE:
        return _APART[blocks.state[block]]
    alone = blocks.refs[block] == 1
    if blocks.hash[block] is None:
        return BlockUse.FILLING if alone and blocks.pending[block] is None else BlockUse.PENDING
    return BlockUse.SEALED if alone else BlockUse.SHARED


def _num_blocks(sequence: Sequence) -> int:
    """Return how many blocks, or pages, a sequence holds."""
    held = sequence.block_pages * (len(sequence.block_table) - sequence.trimmed)
    return held + sum(run.own_pages(0) for run in sequence.runs)


def _sequence(sequence: Sequence, config: LedgerConfig) -> SequenceUse:
    return SequenceUse(
        sequence=sequence.id,
        request_id=sequence.request_id,
        tenant=sequence.tenant,
        phase=sequence.phase,
        blocks=_num_blocks(sequence),
        n_shared=max(0, sequence.n_shared - sequence.trimmed),
        max_blocks=config.pages_of(sequence.max_blocks) if config.groups else sequence.max_blocks,
    )
