"""The waste of paging: worked examples to the slot, and a workload that can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.waste import mixed_requests
from cli.block_size.accounting import (
    BLOCK_SIZES,
    GroupPages,
    ReservedSlots,
    Waste,
    contiguous_slots,
    count_fitting,
    count_pages,
    count_pressed,
    count_reserved,
    count_steps,
    count_waste,
    new_ledger,
    paged_slots,
)
from common.contracts.lease import Report, Reserve
from common.contracts.types import KvGroup, KvGroupKind, SequenceId
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger import runway

THREE, FOUR = (800, 2300, 3900), (600, 900, 1300, 1700)


@pytest.mark.parametrize(
    ("lengths", "max_len", "contiguous", "paged"), [(THREE, 4096, 5288, 424), (FOUR, 2048, 3692, 620)]
)
def test_the_worked_examples(lengths: tuple[int, ...], max_len: int, contiguous: int, paged: int) -> None:
    assert contiguous_slots(lengths, max_len).wasted == contiguous
    assert paged_slots(lengths, 256).wasted == paged


def test_waste_is_a_part_of_the_slots_with_a_token() -> None:
    assert contiguous_slots(THREE, 4096) == ReservedSlots(reserved=12_288, used=7000)
    assert contiguous_slots(THREE, 4096).waste == 5288 / 7000
    assert paged_slots(THREE, 256).waste == 424 / 7000


def test_full_blocks_waste_nothing() -> None:
    assert paged_slots((16, 32, 48), 16).wasted == 0


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.sampled_from(BLOCK_SIZES))
@example(list(THREE), 256)
@example(list(FOUR), 256)
def test_the_ledger_gives_as_many_blocks(lengths: list[int], block_size: int) -> None:
    slots = paged_slots(lengths, block_size)
    ledger = new_ledger(LedgerConfig(slots.reserved // block_size, block_size, watermark=0.0))
    ledger.apply_report(
        Report(reserve=tuple(Reserve(SequenceId(i), each, each) for i, each in enumerate(lengths, start=1)))
    )
    ledger.schedule()
    assert (ledger.pool_counts().running, ledger.pool_counts().in_use) == (len(lengths), slots.reserved // block_size)


def test_a_small_workload_adds_up_by_hand() -> None:
    """5 prompt tokens and 3 to draw, in blocks of 4: three steps, with 5, 6 and 7 tokens in two blocks."""
    sums = count_waste(4, [(5, 3)])
    assert (sums.used, sums.in_rows, sums.rows) == (5 + 6 + 7, 3 * 8, 3)
    assert sums.share == pytest.approx(6 / 18)
    assert sums.contiguous_share(10) == pytest.approx(1 - 18 / 30)


def test_a_pool_grows_with_the_longest_request() -> None:
    """200,000 tokens are more than the least pool has slots; a step takes 2048 of them."""
    assert count_waste(256, [(200_000, 1)]).rows == 98


MIXED = mixed_requests(256, seed=0)


@pytest.mark.parametrize("blocks", [400, 1000])
def test_under_pressure_the_runway_is_at_most_three_percent(blocks: int) -> None:
    """64 sequences would use some 1,500 blocks: others wait for blocks at most steps."""
    pressed = count_pressed(16, MIXED, blocks)
    assert pressed.rows > 0.8 * count_waste(16, MIXED).rows
    assert pressed.runway_share <= 0.03


@pytest.mark.parametrize(("blocks", "delay"), [(400, 3), (1000, 1)])
def test_the_smaller_runway_under_pressure_costs_no_steps(
    blocks: int, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is answered so many steps later."""
    smaller = count_steps(16, MIXED, blocks, delay)
    monkeypatch.setattr(runway, "RUNWAY_UNDER_PRESSURE", 1)
    assert smaller <= 1.02 * count_steps(16, MIXED, blocks, delay)


def test_the_runway_is_counted_apart() -> None:
    assert Waste(used=100, in_rows=120, leased=50, rows=1).runway_share == 0.5


def test_pages_of_a_window_add_up_by_hand() -> None:
    """A prompt of 40 tokens has 3 blocks in each group; behind it two steps lack the first one of the window."""
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(KvGroupKind.WINDOW, 16, 2, (0, 2)))
    sums = count_pages(16, [(40, 3)], groups)
    assert sums.steps == 3
    assert sums.groups == (GroupPages(held=9, read=9), GroupPages(held=6 + 4 + 4, read=6 + 4 + 4))


def test_blocks_ahead_of_need_hold_nothing_that_is_read() -> None:
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(KvGroupKind.WINDOW, 16, 2, (0, 2)))
    full, window = count_pages(16, [(160, 20)], groups).groups
    assert 0 < full.unread < 0.1 * full.held
    assert 0 < window.unread < 0.1 * window.held


def test_regions_for_whole_sequences_are_counted_as_by_hand() -> None:
    """Two of four fit. They hold 2 and 2 tokens, then 3 and 3; the last two are the end of the trace, and do not count.

    The last token that is sampled is never stored.
    """
    assert count_reserved(lambda _: 4, [(2, 2)] * 4, slots=9) == Waste(used=10, in_rows=16, rows=4, steps=2)
    with pytest.raises(ValueError, match="a region of 10 slots; expected 9 at most"):
        count_reserved(lambda _: 10, [(2, 2)], slots=9)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=60),
    st.integers(1, 6),
)
def test_the_ledger_grants_a_block_for_each_as_regions_are_counted(requests: list[tuple[int, int]], fit: int) -> None:
    """So the counted regions of other sizes stand beside blocks that the ledger grants."""
    assert count_fitting(64, requests, fit) == count_reserved(lambda _: 64, requests, 64 * fit)


def test_regions_that_never_grow_leave_no_block_free() -> None:
    """The ledger's watermark is for growth: of 200 blocks it would keep two."""
    counted = count_fitting(64, [(10, 9)] * 900, 200)
    assert counted.rows == 200 * counted.steps > 0


def test_in_small_blocks_more_fit_into_equal_memory() -> None:
    requests, slots = mixed_requests(120, seed=0), 16_384
    paged = count_fitting(16, requests, slots // 16)
    whole = count_fitting(2048, requests, slots // 2048)
    buddy = count_reserved(lambda each: 1 << (sum(each) - 1).bit_length(), requests, slots)
    assert whole.rows / whole.steps == slots // 2048
    assert paged.rows / paged.steps > 1.2 * buddy.rows / buddy.steps > 2 * whole.rows / whole.steps
    assert paged.share < 0.04 < buddy.share < whole.share
    assert paged.in_rows + paged.leased <= slots * paged.steps
