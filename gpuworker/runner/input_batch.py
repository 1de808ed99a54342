"""The sequences that the runner holds: each has a batch index, its row of the token table and of the block tables.

The block tables lie on the host and are kept from step to step, because a row seldom gains more than one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.contracts.types import BlockId, SequenceId
from gpuworker.attention.interface import Int32Array
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.batch_plan import ScheduledRow


@dataclass(slots=True)
class BatchEntry:
    """One sequence of the batch; `blocks` are those that its row of the block table holds."""

    index: int
    row: SampledRow
    blocks: tuple[BlockId, ...] = ()


class InputBatch:
    """Assigns batch indices to sequences, and keeps their block tables. Only the engine's thread uses it."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self._free = list(range(max_num_seqs))[::-1]
        self._entries: dict[SequenceId, BatchEntry] = {}
        self._table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, sequence: SequenceId) -> BatchEntry:
        return self._entries[sequence]

    def add(self, sequence: SequenceId, row: SampledRow) -> BatchEntry:
        """Give a sequence a free index. Raises ValueError when the sequence has one already, or when none is free."""
        if sequence in self._entries or not self._free:
            why = "is in the batch already" if sequence in self._entries else f"finds {len(self._entries)} others in it"
            raise ValueError(f"sequence {sequence} {why}")
        entry = self._entries[sequence] = BatchEntry(self._free.pop(), row)
        return entry

    def remove(self, sequence: SequenceId) -> SampledRow | None:
        """Free the index of a sequence, and return its sampling parameters; None for an unknown sequence."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return None
        self._free.append(entry.index)
        return entry.row

    def indices_of(self, rows: Sequence[ScheduledRow]) -> Int32Array:
        """Return the batch indices [R] of the rows of a step, after writing their blocks into the table."""
        entries, indices = self._entries, []
        for row in rows:
            entry = entries[row.sequence]
            indices.append(entry.index)
            if row.blocks is not entry.blocks:
                self._update(entry, row.blocks)
        return np.array(indices, dtype=np.int32)

    def block_table(self, batch_index: Int32Array, width: int) -> Int32Array:
        """Return a copy [R, width] of the block tables at `batch_index` [R]; trimmed blocks are 0."""
        return self._table[batch_index, :width]

    def _update(self, entry: BatchEntry, blocks: tuple[BlockId, ...]) -> None:
        """Write only the new blocks where `blocks` extends the old table, which is the usual case."""
        known = len(entry.blocks)
        same = known <= len(blocks) and blocks[:known] == entry.blocks
        changed = np.array(blocks[known:] if same else blocks, dtype=np.int32)
        begin = known if same else 0
        end = min(len(blocks), self._table.shape[1])
        self._table[entry.index, begin:end] = np.maximum(changed[: end - begin], 0)
        entry.blocks = blocks
