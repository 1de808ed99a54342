"""The arrays of decode steps, written over for a later step of the same sequences.

From one decode step to the next little changes: each row is one position further, and now and then a row has one block
more. Weights go through all caches in a step, so the code between two steps finds them cold. To lay out a step of four
rows anew, with its tensors and structures, takes 0.36 ms of CPU more there than to write over the arrays of one that is
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from common.contracts.types import TRIMMED, BlockId, SequenceId
from gpuworker.attention.interface import Int32Array
from gpuworker.memory.layout import Part
from gpuworker.runner.launcher import LaidOutStep
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult

SPARE_BLOCKS: Final = 8
"""Columns of a block table beyond the blocks of a step, so that its rows may grow."""


def only_decodes(plan: StepPlan) -> bool:
    """Whether each row of a step computes one position and samples, and the step does nothing else."""
    return bool(plan.rows) and not (
        plan.prefilled or plan.drafts or plan.scored or plan.copies or plan.loads or plan.saves
    )


class _Pages:
    """The tables and the slots of the parts of one group of layers, which are written over for later steps."""

    def __init__(self, group: int, rows: Sequence[ScheduledRow]) -> None:
        self._group = group
        self._parts: list[tuple[Part, Int32Array, Int32Array]] = []
        self._known = [row.tables[group] for row in rows]

    def add(self, part: Part, table: Int32Array, slots: Int32Array) -> None:
        """Take in the table [R, columns] and the slots [R] of a part; layers may share their lanes."""
        self._parts.append((part, table, slots))

    def move_to(self, rows: Sequence[ScheduledRow], mask: int, shift: int) -> None:
        """Write what rows add to their tables, and their slots; what was trimmed stays, because nobody reads it."""
        tables = [row.tables[self._group] for row in rows]
        for part, _, slots in self._parts:
            pages, page, shares, share = part.pages, part.page, part.shares, part.share
            slots[:] = [
                table[(row.start >> shift) * pages + page] * shares + share << shift | row.start & mask
                for row, table in zip(rows, tables, strict=True)
            ]
        for index, table in enumerate(tables):
            if table is not self._known[index]:
                self._write(index, table)

    def _write(self, index: int, pages: tuple[BlockId, ...]) -> None:
        known, trimmed = self._known[index], pages.count(TRIMMED)
        same = trimmed <= len(known) <= len(pages) and pages[trimmed : len(known)] == known[trimmed:]
        first = len(known) if same else trimmed
        for part, table, _ in self._parts:
            end = min(len(pages) // part.pages, table.shape[1])
            begin = min(first // part.pages, end)
            its = pages[begin * part.pages + part.page : end * part.pages : part.pages]
            table[index, begin:end] = [page * part.shares + part.share for page in its] if part.shares > 1 else its
        self._known[index] = pages


class DecodeFrame:
    """A decode step on a CPU that may run again, further on: R rows of one position each, all of which sample.

    `result` is the future of the step that runs on it. Nobody reads the arrays once that is set. The executor keeps in
    `described` what it made of them.
    """

    def __init__(
        self,
        work: LaidOutStep,
        rows: Sequence[ScheduledRow],
        block_size: int,
        result: Future[StepResult],
        parts: Sequence[Part] = (),
    ) -> None:
        assert work.inputs is not None, "arrays on a CPU"
        packed = work.staged.rows
        self.work, self.result = work, result
        self.described: Any = None
        self._mask, self._shift = block_size - 1, block_size.bit_length() - 1
        self._context, self._slots, self._table = packed.context_len, packed.slot_mapping, packed.block_table
        self._positions: npt.NDArray[np.int64] = work.inputs.positions.numpy()  # [R]
        self._take: npt.NDArray[np.int64] = work.inputs.take.numpy()  # [R]
        self._first = self._take - self._positions  # of each row in the token table
        self._next = work.point.positions  # [R], where the samples go
        self._blocks = [row.blocks for row in rows]
        self._groups: dict[int, _Pages] = {}
        tables = [(packed.block_table, packed.slot_mapping), *packed.others]
        for part, pair in zip(parts, tables if parts else (), strict=True):
            self._groups.setdefault(part.group, _Pages(part.group, rows)).add(part, *pair)

    def fits(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the block table has a column for each block that the rows read or write."""
        return bool(max([row.start for row in rows]) >> self._shift < self._table.shape[1])

    def move_to(self, rows: Sequence[ScheduledRow]) -> None:
        """Write the positions and the blocks of a step of the same sequences, in the same order, over the arrays."""
        mask, shift = self._mask, self._shift
        starts = [row.start for row in rows]
        self._positions[:] = starts
        np.add(self._positions, self._first, out=self._take)
        np.add(self._positions, 1, out=self._next)
        self._context[:] = self._next
        if self._groups:
            for group in self._groups.values():
                group.move_to(rows, mask, shift)
            return
        self._slots[:] = [row.blocks[row.start >> shift] << shift | row.start & mask for row in rows]
        for index, row in enumerate(rows):
            if row.blocks is not self._blocks[index]:
                self._write_blocks(index, row.blocks)

    def _write_blocks(self, index: int, blocks: tuple[BlockId, ...]) -> None:
        known = self._blocks[index]
        begin = len(known) if blocks[: len(known)] == known else 0
        end = min(len(blocks), self._table.shape[1])
        self._table[index, begin:end] = [max(block, 0) for block in blocks[begin:end]]  # trimmed ones are 0
        self._blocks[index] = blocks


class DecodeFrames:
    """The frames of the sequences that decoded last. Where layers are groups, a step has tables of `parts`."""

    def __init__(self, block_size: int, parts: Sequence[Part] = ()) -> None:
        self._block_size, self._parts = block_size, parts
        self._sequences: tuple[SequenceId, ...] = ()
        self._frames: list[DecodeFrame] = []

    def clear(self) -> None:
        """Forget all; call it when a sequence leaves, because its place in the batch is another one's then."""
        self._sequences, self._frames = (), []

    def take(self, rows: Sequence[ScheduledRow], sequences: tuple[SequenceId, ...]) -> DecodeFrame | None:
        """Return a frame of an earlier step, moved to these rows; None where all are in use, or too narrow."""
        if sequences != self._sequences:
            return None
        frame = next((each for each in self._frames if each.result.done()), None)
        if frame is None:
            return None
        if not frame.fits(rows):
            self._frames.remove(frame)
            return None
        frame.move_to(rows)
        return frame

    def keep(
        self,
        work: LaidOutStep,
        rows: Sequence[ScheduledRow],
        sequences: tuple[SequenceId, ...],
        result: Future[StepResult],
    ) -> DecodeFrame:
        """Return a new frame of a step that was laid out."""
        if sequences != self._sequences:
            self._sequences, self._frames = sequences, []
        frame = DecodeFrame(work, rows, self._block_size, result, self._parts)
        self._frames.append(frame)
        return frame
