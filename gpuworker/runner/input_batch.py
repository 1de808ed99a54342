"""Where the runner keeps its sequences: each has a seat, one row of the token table and of the block tables.

The block tables lie on the host and are kept from step to step, because a row seldom gains more than one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.types import BlockId, SequenceId
from gpuworker.attention.interface import Int32Array
from gpuworker.core.batch_plan import ScheduledRow
from gpuworker.sampling.rows import SampledRow


@dataclass(slots=True)
class Seat:
    """One seated sequence; `blocks` is the row as it stands in the block table."""

    index: int
    sampled: SampledRow
    blocks: tuple[BlockId, ...] = ()


class Seats:
    """Gives seats, and keeps the block tables of those who sit. Used by the engine's thread only."""

    def __init__(self, count: int, max_blocks: int) -> None:
        self._free = list(range(count))[::-1]
        self._taken: dict[SequenceId, Seat] = {}
        self._table = np.zeros((count, max_blocks), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, sequence: SequenceId) -> Seat:
        return self._taken[sequence]

    def take(self, sequence: SequenceId, sampled: SampledRow) -> Seat:
        """Seat a sequence. Raises ValueError when it has a seat already or none is free: the caller's mistake."""
        if sequence in self._taken or not self._free:
            why = "is seated already" if sequence in self._taken else f"finds all {len(self._taken)} seats taken"
            raise ValueError(f"sequence {sequence} {why}")
        seat = self._taken[sequence] = Seat(self._free.pop(), sampled)
        return seat

    def leave(self, sequence: SequenceId) -> SampledRow | None:
        """Free the seat of a sequence, and return how it was sampled; None for one without a seat."""
        seat = self._taken.pop(sequence, None)
        if seat is None:
            return None
        self._free.append(seat.index)
        return seat.sampled

    def of_rows(self, rows: Sequence[ScheduledRow]) -> Int32Array:
        """Return the seats [R] of the rows of a step, after writing their blocks into the table."""
        taken, index = self._taken, []
        for row in rows:
            seat = taken[row.sequence]
            index.append(seat.index)
            if row.blocks is not seat.blocks:
                self._update(seat, row.blocks)
        return np.array(index, dtype=np.int32)

    def block_table(self, seats: Int32Array, width: int) -> Int32Array:
        """Return a copy [R, width] of the block tables of seats [R]; trimmed blocks are 0."""
        return self._table[seats, :width]

    def _update(self, seat: Seat, blocks: tuple[BlockId, ...]) -> None:
        """Write what changed: mostly a row is the old one with blocks added."""
        known = len(seat.blocks)
        same = known <= len(blocks) and blocks[:known] == seat.blocks
        changed = np.array(blocks[known:] if same else blocks, dtype=np.int32)
        begin = known if same else 0
        end = min(len(blocks), self._table.shape[1])
        self._table[seat.index, begin:end] = np.maximum(changed[: end - begin], 0)
        seat.blocks = blocks
