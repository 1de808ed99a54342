"""Which rows share which blocks, found from block tables alone."""

from __future__ import annotations

import numpy as np

from gpuworker.attention.work_list import SharedPrefix, shared_prefixes

BLOCK = 4


def find(rows: list[list[int]], context: list[int], worth: int = 1) -> tuple[list[int], list[SharedPrefix]]:
    width = max(len(row) for row in rows)
    table = np.array([row + [99] * (width - len(row)) for row in rows], dtype=np.int32)
    order, found = shared_prefixes(table, np.array(context, dtype=np.int32), BLOCK, worth)
    return order.tolist(), found


def test_rows_without_a_common_block_stay_as_they_are() -> None:
    assert find([[1, 2], [3, 4], [5, 2]], [8, 8, 8]) == ([0, 1, 2], [])


def test_rows_that_begin_alike_become_neighbours() -> None:
    order, found = find([[1, 2, 3], [7, 8, 9], [1, 2, 4]], [12, 12, 12])
    assert order == [0, 2, 1]
    assert found == [SharedPrefix(0, 2, begin=0, end=2)]


def test_the_block_of_the_last_position_is_never_shared() -> None:
    assert find([[1, 2], [1, 2]], [8, 8])[1] == [SharedPrefix(0, 2, 0, 1)]
    assert find([[1, 2], [1, 2]], [9, 9])[1] == [SharedPrefix(0, 2, 0, 2)]
    assert find([[1, 2], [1, 2]], [9, 5])[1] == [SharedPrefix(0, 2, 0, 1)]
    assert find([[1, 2], [1, 2]], [4, 9])[1] == []


def test_prefixes_nest_and_the_outer_one_stands_first() -> None:
    rows = [[1, 2, 5, 6], [1, 2, 3, 4], [1, 2, 5, 7], [1, 2, 3, 4], [8, 2, 3, 4]]
    order, found = find(rows, [16, 16, 16, 17, 16])
    assert order == [1, 3, 0, 2, 4]
    assert found == [SharedPrefix(0, 4, 0, 2), SharedPrefix(0, 2, 2, 3), SharedPrefix(2, 4, 2, 3)]


def test_an_outer_prefix_too_short_to_pay_is_left_to_the_inner_one() -> None:
    """The third row shares one block only, which saves 2 * 4 slots; without it, the other two save 3 * 4."""
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7, 8]]
    assert find(rows, [16, 16, 16], worth=12)[1] == [SharedPrefix(0, 2, 0, 3)]
    assert find(rows, [16, 16, 16], worth=8)[1] == [SharedPrefix(0, 3, 0, 1), SharedPrefix(0, 2, 1, 3)]


def test_worth_counts_the_slots_that_are_not_read_again() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    saved = (3 - 1) * 2 * BLOCK
    assert find(rows, [12, 12, 12], worth=saved)[1] == [SharedPrefix(0, 3, 0, 2)]
    assert find(rows, [12, 12, 12], worth=saved + 1)[1] == []


def test_trimmed_rows_share_nothing() -> None:
    """Trimmed entries all hold the same number, whatever stood there."""
    assert find([[0, 0, 3], [0, 0, 4]], [12, 12]) == ([0, 1], [])


def test_padding_rows_share_nothing() -> None:
    assert find([[0, 0], [0, 0], [0, 0]], [0, 0, 0]) == ([0, 1, 2], [])
    assert find([[5, 6], [0, 0], [5, 7]], [8, 0, 8])[1] == [SharedPrefix(1, 3, 0, 1)]


def test_equal_rows_share_all_but_their_last_block() -> None:
    order, found = find([[1, 2, 3]] * 5, [12] * 5)
    assert order == [0, 1, 2, 3, 4]
    assert found == [SharedPrefix(0, 5, 0, 2)]


def test_one_row_and_none() -> None:
    assert find([[1, 2]], [8]) == ([0], [])
    empty = shared_prefixes(np.zeros((0, 3), dtype=np.int32), np.zeros(0, dtype=np.int32), BLOCK, 1)
    assert (empty[0].tolist(), empty[1]) == ([], [])
