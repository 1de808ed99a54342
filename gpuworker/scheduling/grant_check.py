"""Checks a batch of grants before any of it is applied: kernels and copies use block ids as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, GrantBatch, blocks_before_window
from common.contracts.types import TRIMMED, BlockId, SequenceId
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.sequence import Sequence


def check_grants(
    batch: GrantBatch, blocks: BlockStates, sequences: Mapping[SequenceId, Sequence], block_size: int, window: int = 0
) -> None:
    """Raise ProtocolViolation when a grant names a block that there is not, or that the worker still holds.

    Raises it also for a block table that is too long for its sequence, that leaves nothing to compute, or that lacks a
    block which the sequence reads.
    """
    blocks.refuse_unknown(batch.lease)
    for admit in batch.admit:
        empty = leading_empty(admit.block_table)
        blocks.refuse_unknown(admit.block_table[empty:])
        if empty:
            _check_window(admit, empty, blocks, sequences.get(admit.sequence), block_size, window)
        _check_table(admit, sequences.get(admit.sequence), block_size)
    granted = [block for admit in batch.admit for block in admit.block_table[admit.n_shared :]]
    blocks.refuse_held([*granted, *batch.lease])
    if batch.copy:
        blocks.refuse_unknown([copy.src for copy in batch.copy])
        _check_targets([copy.dst for copy in batch.copy], frozenset(granted))


def leading_empty(block_table: tuple[BlockId, ...]) -> int:
    """Return how many places at the start of a block table have no block."""
    if not block_table or block_table[0] != TRIMMED:
        return 0
    return next((place for place, block in enumerate(block_table) if block != TRIMMED), len(block_table))


def _check_window(
    admit: Admit, empty: int, blocks: BlockStates, sequence: Sequence | None, block_size: int, window: int
) -> None:
    """Check that no token behind the shared blocks reads an empty place, and that all they read is there already."""
    shared = admit.block_table[empty : admit.n_shared]
    most = blocks_before_window(admit.n_shared * block_size, window, block_size)
    if not shared or empty > most:
        what = f"a block table without its first {empty} blocks, of {admit.n_shared} shared; it may lack {most}"
        raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")
    for place, block in enumerate(shared, start=empty):
        content = blocks.content.get(block)
        wanted = sequence.block_hashes[place : place + 1] if sequence is not None else None
        other = content is not None and wanted is not None and wanted != [content.hash]
        if blocks.fill[block] != block_size or other:
            what = f"block {block}, which is not the full block {place} of it, behind {empty} that it lacks"
            raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")


def _check_table(admit: Admit, sequence: Sequence | None, block_size: int) -> None:
    length, shared = len(admit.block_table), admit.n_shared
    if shared > length:
        raise ProtocolViolation(f"sequence {admit.sequence} shares {shared} blocks of a block table of {length}")
    if sequence is None:
        return
    if shared * block_size >= len(sequence.tokens):
        raise ProtocolViolation(f"sequence {sequence.id} shares {shared} blocks: all of its tokens")
    if shared and sequence.computes_all:
        raise ProtocolViolation(f"sequence {sequence.id} shares {shared} blocks, and computes all its tokens")
    most = -(-sequence.limit // block_size)
    if length > most:
        raise ProtocolViolation(f"sequence {sequence.id} was granted {length} blocks; at most {most} fit")


def _check_targets(targets: Collection[BlockId], granted: frozenset[BlockId]) -> None:
    for block in targets:
        if block not in granted:
            raise ProtocolViolation(f"block {block} is the target of a copy, and no admission grants it")
