"""Frozen views of a worker's blocks, for operators: how each of them is used, and everything about one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from common.contracts.types import BlockHash, BlockId, SequencePhase
from kvmanager.contracts.block import Blocks, BlockState
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

    `blocks` and `n_shared` count no places whose blocks left the window.
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
    """A page of the pool from `first_block` on, a byte of `uses` a block; sequences with the most blocks come first."""

    num_blocks: int
    block_size: int
    first_block: int
    uses: bytes
    sequences: tuple[SequenceUse, ...]
    num_sequences: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block; `references` counts all block tables that hold it, and copies of it that have not run.

    `holders` are the first of the sequences of these block tables.
    """

    block: BlockId
    use: BlockUse
    references: int
    index: int
    hash: BlockHash | None
    holders: tuple[SequenceUse, ...]
    figures: tuple[tuple[str, float], ...]


_APART = {BlockState.FREE: BlockUse.FREE, BlockState.LEASED: BlockUse.LEASED, BlockState.CACHED: BlockUse.CACHED}


def map_of(store: BlockStore, sequences: SequenceTable, first_block: int, limit: int, most_sequences: int) -> BlockMap:
    """Return the uses of `limit` blocks, and the sequences with the most blocks."""
    there = range(store.config.num_blocks)[first_block : first_block + limit]
    uses = bytes(use_of(store.blocks, BlockId(block)) for block in there)
    ordered = sorted(sequences.live.values(), key=lambda each: (-len(each.block_table), each.arrival))
    config, greatest = store.config, tuple(_sequence(each) for each in ordered[:most_sequences])
    return BlockMap(config.num_blocks, config.block_size, first_block, uses, greatest, len(ordered))


def view_of(store: BlockStore, sequences: SequenceTable, block_id: BlockId, most_holders: int) -> BlockView:
    """Return one block of the pool. A sequence that holds it has it at the block's own place in its block table."""
    blocks, holders = store.blocks, list[SequenceUse]()
    refs, index = blocks.refs[block_id], blocks.index[block_id]
    if refs:
        held = (each for each in sequences.live.values() if _holds(each, block_id, index))
        holders = [_sequence(each) for each, _ in zip(held, range(most_holders), strict=False)]
    figures = store.eviction.known_of(block_id) if blocks.state[block_id] is BlockState.CACHED else ()
    use = use_of(blocks, block_id)
    return BlockView(block_id, use, refs, index, blocks.hash[block_id], tuple(holders), figures)


def use_of(blocks: Blocks, block: BlockId) -> BlockUse:
    if blocks.state[block] is not BlockState.IN_USE:
        return _APART[blocks.state[block]]
    alone = blocks.refs[block] == 1
    if blocks.hash[block] is None:
        return BlockUse.FILLING if alone and blocks.pending[block] is None else BlockUse.PENDING
    return BlockUse.SEALED if alone else BlockUse.SHARED


def _holds(sequence: Sequence, block: BlockId, index: int) -> bool:
    return index < len(sequence.block_table) and sequence.block_table[index] == block


def _sequence(sequence: Sequence) -> SequenceUse:
    return SequenceUse(
        sequence=sequence.id,
        request_id=sequence.request_id,
        tenant=sequence.tenant,
        phase=sequence.phase,
        blocks=len(sequence.block_table) - sequence.trimmed,
        n_shared=max(0, sequence.n_shared - sequence.trimmed),
        max_blocks=sequence.max_blocks,
    )
