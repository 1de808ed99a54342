"""A frozen view of one sequence's block table, for operators and tests."""

from __future__ import annotations

from dataclasses import dataclass

from common.contracts.types import TRIMMED, BlockId, SequenceId, SequencePhase
from kvmanager.contracts.block import Blocks
from kvmanager.contracts.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of a sequence in order; the first `n_shared` were hits at admission, `sealed_blocks` are registered."""

    sequence: SequenceId
    request_id: str
    phase: SequencePhase
    block_ids: tuple[BlockId, ...]
    n_shared: int
    sealed_blocks: int


def table_of(sequence: Sequence, blocks: Blocks) -> BlockTable:
    sealed = sum(blocks.hash[block] is not None for block in sequence.block_table if block != TRIMMED)
    block_table = tuple(sequence.block_table)
    return BlockTable(sequence.id, sequence.request_id, sequence.phase, block_table, sequence.n_shared, sealed)
