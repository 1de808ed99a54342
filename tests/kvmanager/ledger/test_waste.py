"""Waste is below one block a sequence; the worked examples through the real ledger."""

from __future__ import annotations

import pytest

from tests.support.kvmanager.ledgers import make_ledger, play, prompt, reserve


@pytest.mark.parametrize(
    ("lengths", "contiguous_each", "paged", "contiguous"),
    [((800, 2300, 3900), 4096, 424, 5288), ((600, 900, 1300, 1700), 2048, 620, 3692)],
)
def test_slots_wasted_by_blocks_of_256(
    lengths: tuple[int, ...], contiguous_each: int, paged: int, contiguous: int
) -> None:
    ledger = make_ledger(64, 256)
    play(ledger, reserve=[reserve(n, prompt(length, 10_000 * n), block_size=256) for n, length in enumerate(lengths)])
    assert ledger.pool_counts().in_use * 256 - sum(lengths) == paged
    assert contiguous_each * len(lengths) - sum(lengths) == contiguous


@pytest.mark.parametrize("length", range(1, 34))
def test_waste_is_below_a_block(length: int) -> None:
    ledger = make_ledger(4)
    play(ledger, reserve=(reserve(1, prompt(length)),))
    assert 0 <= ledger.pool_counts().in_use * 16 - length < 16
