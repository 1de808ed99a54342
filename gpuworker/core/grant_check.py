"""Checks a batch of grants before any of it is applied: kernels and copies use block ids as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from common.errors import ProtocolViolation
from common.lease import Admit, GrantBatch
from common.types import BlockId, SequenceId
from gpuworker.core.block_states import BlockStates
from gpuworker.core.sequence import Sequence


def check_grants(
    batch: GrantBatch, blocks: BlockStates, sequences: Mapping[SequenceId, Sequence], block_size: int
) -> None:
    """Raise ProtocolViolation when a grant names a block that there is not, or that the worker still holds.

    The same for a block table that is too long for its sequence, and one that leaves nothing to compute.
    """
    blocks.refuse_unknown(batch.lease)
    for admit in batch.admit:
        blocks.refuse_unknown(admit.block_table)
        _check_table(admit, sequences.get(admit.sequence), block_size)
    granted = [block for admit in batch.admit for block in admit.block_table[admit.n_shared :]]
    blocks.refuse_held([*granted, *batch.lease])
    if batch.copy:
        blocks.refuse_unknown([copy.src for copy in batch.copy])
        _check_targets([copy.dst for copy in batch.copy], frozenset(granted))


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
