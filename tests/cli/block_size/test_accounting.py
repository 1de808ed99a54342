"""The waste of paging: worked examples to the slot, and a workload that can be counted by hand."""

from __future__ import annotations

import pytest

from cli.block_size.accounting import Waste, contiguous_waste, count_waste, paged_waste


def test_three_sequences_waste_5288_contiguous_slots_and_424_paged_ones() -> None:
    lengths = (800, 2300, 3900)
    assert contiguous_waste(lengths, 4096) == 5288
    assert paged_waste(lengths, 256) == 424


def test_four_sequences_waste_3692_contiguous_slots_and_620_paged_ones() -> None:
    lengths = (600, 900, 1300, 1700)
    assert contiguous_waste(lengths, 2048) == 3692
    assert paged_waste(lengths, 256) == 620


def test_full_blocks_waste_nothing() -> None:
    assert paged_waste((16, 32, 48), 16) == 0


def test_a_small_workload_adds_up_by_hand() -> None:
    """5 prompt tokens and 3 to draw, in blocks of 4: three steps, with 5, 6 and 7 tokens in two blocks."""
    sums = count_waste(4, [(5, 3)])
    assert (sums.used, sums.in_rows, sums.rows) == (5 + 6 + 7, 3 * 8, 3)
    assert sums.share == pytest.approx(6 / 18)
    assert sums.contiguous_share(10) == pytest.approx(1 - 18 / 30)


def test_a_pool_grows_with_the_longest_request() -> None:
    """200,000 tokens are more than the least pool has slots; a step takes 2048 of them."""
    assert count_waste(256, [(200_000, 1)]).rows == 98


def test_the_runway_is_counted_apart() -> None:
    assert Waste(used=100, in_rows=120, leased=50, rows=1).runway_share == 0.5
