"""Closes blocks once a step has computed them: seals those that are full, frees those that no layer reads any more."""

from __future__ import annotations

from common.contracts.lease import blocks_before_window
from common.contracts.types import TRIMMED, BlockId, SequencePhase
from gpuworker.scheduling.batch_plan import ScheduledRow
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.report_builder import ReportBuilder
from gpuworker.scheduling.sequence import Sequence


class BlockCloser:
    """The rules by which completed steps change the content of blocks. It has no state of its own.

    A `step` is that of the last plan: it may have used the blocks too.
    """

    def __init__(self, block_size: int, window: int, blocks: BlockStates, report: ReportBuilder) -> None:
        self._block_size, self._window = block_size, window
        self._shift = block_size.bit_length() - 1
        self._blocks = blocks
        self._report = report

    def close(self, sequence: Sequence, row: ScheduledRow, end: int, step: int) -> None:
        """Seal each block whose last slot before position `end` a row wrote, by its id in the row's snapshot.

        None is sealed past the accepted tokens.
        """
        if sequence.hashed:
            for index in range(row.start >> self._shift, min(end, len(sequence.tokens)) >> self._shift):
                self._seal(row.blocks[index], sequence, index, step)
        if self._window:
            self._trim(sequence, end, step)

    def _seal(self, block: BlockId, sequence: Sequence, index: int, step: int) -> None:
        block_hashes, parts = sequence.block_hashes, sequence.parts_of(index) if sequence.partly else ()
        parent = block_hashes[index - 1] if index else None
        self._blocks.content[block] = Content(block_hashes[index], parent, index, step)
        self._report.seal(block, block_hashes[index], parts)

    def _trim(self, sequence: Sequence, next_position: int, step: int) -> None:
        """Free leading blocks that no position from `next_position` on reads; steps in flight start there or later."""
        gone = blocks_before_window(next_position, self._window, self._block_size)
        if gone <= sequence.trimmed or sequence.phase is not SequencePhase.RUNNING:
            return
        self._blocks.let_go(sequence.block_table[sequence.trimmed : gone], step)
        sequence.block_table[sequence.trimmed : gone] = [TRIMMED] * (gone - sequence.trimmed)
        sequence.snapshot = None
        sequence.trimmed = gone
        self._report.trim(sequence.id, gone)
