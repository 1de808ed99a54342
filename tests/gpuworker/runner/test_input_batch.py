"""Seats and the block tables that they keep."""

from __future__ import annotations

import numpy as np
import pytest

from common.types import TRIMMED, BlockId, SamplingParams, SequenceId
from gpuworker.core.batch_plan import ScheduledRow
from gpuworker.runner.input_batch import Seats
from gpuworker.sampling.rows import SampledRow

ROW = SampledRow(SamplingParams(), 1)
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def row(sequence: SequenceId, *blocks: int) -> ScheduledRow:
    return ScheduledRow(sequence, 0, 1, tuple(BlockId(block) for block in blocks), samples=True)


def seated(*sequences: SequenceId) -> Seats:
    seats = Seats(2, 4)
    for sequence in sequences:
        seats.take(sequence, ROW)
    return seats


def table(seats: Seats, *rows: ScheduledRow) -> list[list[int]]:
    tables = seats.block_table(seats.of_rows(rows), 4)
    return [given[: len(row.blocks)].tolist() for given, row in zip(tables, rows, strict=True)]


def test_rows_come_in_the_order_of_the_step() -> None:
    seats = seated(A, B)
    assert table(seats, row(B, 5), row(A, 7, 8)) == [[5], [7, 8]]


def test_a_row_that_grew_gains_its_new_blocks() -> None:
    seats = seated(A)
    table(seats, row(A, 7))
    assert table(seats, row(A, 7, 9, 4)) == [[7, 9, 4]]


def test_a_row_that_changed_is_written_anew() -> None:
    seats = seated(A)
    table(seats, row(A, 7, 8, 9))
    assert table(seats, row(A, 7, 3)) == [[7, 3]]


def test_trimmed_blocks_read_as_block_zero() -> None:
    seats = seated(A)
    table(seats, row(A, 7, 8, 9))
    assert table(seats, row(A, TRIMMED, TRIMMED, 9)) == [[0, 0, 9]]


def test_a_seat_that_was_left_is_taken_again_without_its_old_row() -> None:
    seats = seated(A, B)
    table(seats, row(A, 7, 8))
    index = seats[A].index
    seats.leave(A)
    assert seats.take(C, ROW).index == index
    assert table(seats, row(C, 1)) == [[1]]


def test_the_table_that_was_handed_out_does_not_change() -> None:
    seats = seated(A)
    given = seats.block_table(seats.of_rows([row(A, 7)]), 1)
    seats.of_rows([row(A, 8)])
    np.testing.assert_array_equal(given, [[7]])


@pytest.mark.parametrize(("sequence", "why"), [(A, "seated already"), (C, "all 2 seats taken")])
def test_a_seat_that_cannot_be_given_is_the_callers_mistake(sequence: SequenceId, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        seated(A, B).take(sequence, ROW)


def test_leaving_twice_is_nothing() -> None:
    seats = seated(A)
    seats.leave(A)
    seats.leave(A)
    assert len(seats) == 0
