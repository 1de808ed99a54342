"""The batch indices of sequences, and their block tables."""

from __future__ import annotations

import numpy as np
import pytest

from common.contracts.lease import TierCopy
from common.contracts.types import TRIMMED, BlockId, FrameId, KvGroup, KvGroupKind, SamplingParams, SequenceId
from gpuworker.runner.model_runner import InputBatch
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.batch_plan import ScheduledRow

ROW = SampledRow(SamplingParams(), 1)
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def row(sequence: SequenceId, *blocks: int) -> ScheduledRow:
    return ScheduledRow(sequence, 0, 1, tuple(BlockId(block) for block in blocks), samples=True)


def batch_of(*sequences: SequenceId) -> InputBatch:
    batch = InputBatch(2, 4)
    for sequence in sequences:
        batch.add(sequence, ROW)
    return batch


def table(batch: InputBatch, *rows: ScheduledRow) -> list[list[int]]:
    tables = batch.block_table(batch.indices_of(rows), 4)
    return [given[: len(row.blocks)].tolist() for given, row in zip(tables, rows, strict=True)]


def test_rows_come_in_the_order_of_the_step() -> None:
    batch = batch_of(A, B)
    assert table(batch, row(B, 5), row(A, 7, 8)) == [[5], [7, 8]]


def test_a_row_that_grew_gains_its_new_blocks() -> None:
    batch = batch_of(A)
    table(batch, row(A, 7))
    assert table(batch, row(A, 7, 9, 4)) == [[7, 9, 4]]


def test_a_row_that_changed_is_written_anew() -> None:
    batch = batch_of(A)
    table(batch, row(A, 7, 8, 9))
    assert table(batch, row(A, 7, 3)) == [[7, 3]]


def test_trimmed_blocks_read_as_block_zero() -> None:
    batch = batch_of(A)
    table(batch, row(A, 7, 8, 9))
    assert table(batch, row(A, TRIMMED, TRIMMED, 9)) == [[0, 0, 9]]


def test_a_batch_index_that_was_left_is_taken_again_without_its_old_row() -> None:
    batch = batch_of(A, B)
    table(batch, row(A, 7, 8))
    index = batch[A].index
    batch.remove(A)
    assert batch.add(C, ROW).index == index
    assert table(batch, row(C, 1)) == [[1]]


def test_the_table_that_was_handed_out_does_not_change() -> None:
    batch = batch_of(A)
    given = batch.block_table(batch.indices_of([row(A, 7)]), 1)
    batch.indices_of([row(A, 8)])
    np.testing.assert_array_equal(given, [[7]])


@pytest.mark.parametrize(("sequence", "why"), [(A, "in the batch already"), (C, "2 others in it")])
def test_a_batch_index_that_cannot_be_given_is_the_callers_mistake(sequence: SequenceId, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        batch_of(A, B).add(sequence, ROW)


def test_leaving_twice_is_nothing() -> None:
    batch = batch_of(A)
    batch.remove(A)
    batch.remove(A)
    assert len(batch) == 0


GROUPS = (KvGroup(KvGroupKind.FULL, 0, 1, (0,)), KvGroup(KvGroupKind.WINDOW, 8, 2, (1, 2)))


def grouped(sequence: SequenceId, *tables: tuple[int, ...]) -> ScheduledRow:
    return row(sequence)._replace(tables=tuple(tuple(map(BlockId, table)) for table in tables))


def pages(batch: InputBatch, *rows: ScheduledRow) -> list[list[list[int]]]:
    found = batch.page_tables(batch.indices_of(rows), 2)
    return [[given[at].tolist() for given in found] for at in range(len(rows))]


def test_each_group_has_a_table_of_pages() -> None:
    batch = InputBatch(2, 4, GROUPS)
    for sequence in (A, B):
        batch.add(sequence, ROW)
    rows = grouped(B, (5, 6), (1, 2, 3, 4)), grouped(A, (7,), (8, 9))
    assert pages(batch, *rows) == [[[5, 6], [1, 2, 3, 4]], [[7, 0], [8, 9, 0, 0]]]
    assert pages(batch, grouped(B, (5, 6), (TRIMMED, TRIMMED, 3, 4))) == [[[5, 6], [1, 2, 3, 4]]]
    (table,) = pages(batch, grouped(B, (5, 9), (TRIMMED, TRIMMED, 7, 4)))
    assert (table[0], table[1][2:]) == ([5, 9], [7, 4])


def test_trimmed_pages_are_any_and_what_comes_behind_is_written() -> None:
    batch = InputBatch(1, 4, GROUPS)
    batch.add(A, ROW)
    batch.indices_of([grouped(A, (5,), (1, 2))])
    batch.indices_of([grouped(A, (5, 6, 7), (TRIMMED, TRIMMED, 3, 4, 8, 9))])
    full, windowed = batch.page_tables(batch.indices_of([grouped(A, (5, 6, 7), (*[TRIMMED] * 4, 8, 9))]), 4)
    assert full[0, :3].tolist() == [5, 6, 7]
    assert windowed[0, 4:6].tolist() == [8, 9]
    assert (windowed >= 0).all()


def test_a_row_without_tables_is_refused() -> None:
    batch = InputBatch(1, 4, GROUPS)
    batch.add(A, ROW)
    with pytest.raises(ValueError, match="zip"):
        batch.indices_of([row(A, 3)])


WITH_STATES = (*GROUPS, KvGroup(KvGroupKind.STATE, 0, 3, (3,)))


def test_checkpoints_have_no_table() -> None:
    batch = InputBatch(1, 4, WITH_STATES)
    batch.add(A, ROW)
    assert pages(batch, grouped(A, (5,), (1, 2))) == [[[5, 0], [1, 2, 0, 0]]]
    assert pages(batch, grouped(A, (5, 6), (1, 2, 3, 4), (7, 8, 9))) == [[[5, 6], [1, 2, 3, 4]]]


def test_pages_of_checkpoints_that_become_k_and_v_are_reused_once() -> None:
    batch = InputBatch(2, 4, WITH_STATES)
    for sequence in (A, B):
        batch.add(sequence, ROW)
    batch.write_states([BlockId(page) for page in (1, 6, 9)])
    batch.indices_of([grouped(A, (5,), (1, 2))])
    batch.indices_of([grouped(A, (5, 6), (1, 2, 3, 4))])
    assert sorted(batch.take_reused()) == [1, 6]
    batch.indices_of([grouped(B, (5, 6), (1, 2, 3, 4))])
    assert batch.take_reused() == ()
    batch.write_states([BlockId(6)])
    batch.indices_of([grouped(A, (5, 6), (1, 2, 3, 4)), grouped(B, (5, 6, 9), (1, 2, 3, 4, 7, 8))])
    assert batch.take_reused() == (9,)


def tier(block: int, frame: int, load: bool = False) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame), load)


def test_what_is_loaded_over_states_is_not_cleared_and_states_that_are_loaded_are() -> None:
    batch = InputBatch(1, 4, WITH_STATES)
    batch.add(A, ROW)
    batch.write_states([BlockId(page) for page in (1, 2, 5)])
    # Frame 0 holds the states of page 1, frame 1 K and V of page 9.
    batch.note_copies((tier(1, 0), tier(9, 1), tier(1, 1, load=True), tier(6, 0, load=True)))
    batch.indices_of([grouped(A, (5, 6), (1, 2, 3, 4))])
    assert sorted(batch.take_reused()) == [2, 5, 6]
    batch.note_copies((tier(9, 0), tier(7, 0, load=True)))
    batch.indices_of([grouped(A, (5, 6, 7), (1, 2, 3, 4, 8, 9))])
    assert batch.take_reused() == (), "frame 0 holds K and V now"


def test_states_that_a_transfer_has_brought_to_a_frame_are_followed_too() -> None:
    frames = set[FrameId]()
    batch = InputBatch(1, 4, WITH_STATES, frames)
    batch.add(A, ROW)
    frames |= {FrameId(0), FrameId(1)}
    batch.note_copies((tier(5, 0, load=True), tier(9, 1), tier(6, 1, load=True)))
    batch.indices_of([grouped(A, (5, 6), (1, 2, 3, 4))])
    assert batch.take_reused() == (5,), "what is stored over them is K and V"
    assert frames == {FrameId(0)}


def test_behind_a_failure_what_was_to_be_loaded_may_hold_states() -> None:
    batch = InputBatch(1, 4, WITH_STATES)
    batch.add(A, ROW)
    batch.write_states([BlockId(5)])
    batch.note_copies((tier(9, 1), tier(5, 1, load=True)))
    batch.note_failure()
    batch.indices_of([grouped(A, (5,), (1, 2))])
    assert batch.take_reused() == (5,)


def test_beside_checkpoints_trimmed_pages_are_those_of_the_row() -> None:
    """What became of a page that left is not known: it may hold states, which are no numbers."""
    batch = InputBatch(1, 4, WITH_STATES)
    batch.add(A, ROW)
    batch.indices_of([grouped(A, (5,), (1, 2))])
    (table,) = pages(batch, grouped(A, (5, 6), (TRIMMED, TRIMMED, 3, 4)))
    assert table[1] == [4, 4, 3, 4]
