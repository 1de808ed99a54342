"""What fetches are expected to take, by what they took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.engine.fetch_costs import FetchCosts


def learnt(*fetches: tuple[int, float]) -> FetchCosts:
    costs = FetchCosts()
    for blocks, seconds in fetches:
        costs.learn(blocks, seconds)
    return costs


def test_nothing_is_known_before_the_first_fetch() -> None:
    assert (FetchCosts().setup, FetchCosts().per_block) == (0.0, 0.0)


def test_fetches_of_one_length_have_no_setup() -> None:
    costs = learnt((10, 0.02), (10, 0.04))
    assert costs.setup == pytest.approx(0.0)
    assert costs.per_block == pytest.approx((0.9 * 0.02 + 0.04) / 19)


def test_a_line_is_found() -> None:
    costs = learnt(*((blocks, 0.005 + 0.001 * blocks) for blocks in (1, 64, 8, 512, 32)))
    assert costs.setup == pytest.approx(0.005)
    assert costs.per_block == pytest.approx(0.001)


def test_what_gets_longer_with_fewer_blocks_has_no_slope() -> None:
    costs = learnt((100, 0.01), (1, 0.5))
    assert costs.per_block == 0.0
    assert costs.setup == pytest.approx((0.9 * 0.01 + 0.5) / 1.9)


def test_a_line_that_begins_below_zero_goes_through_the_origin() -> None:
    costs = learnt((10, 0.001), (20, 0.1))
    assert costs.setup == pytest.approx(0.0)
    assert costs.per_block == pytest.approx((0.9 * 0.001 + 0.1) / (0.9 * 10 + 20))


def test_it_follows_a_change() -> None:
    costs = learnt(*[(blocks, 0.001 * blocks) for blocks in (16, 32, 64)], *[(b, 0.01 * b) for b in (16, 32, 64) * 20])
    assert costs.per_block == pytest.approx(0.01, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-6, 1e3)), min_size=1, max_size=60))
def test_costs_are_never_below_zero(fetches: list[tuple[int, float]]) -> None:
    costs = learnt(*fetches)
    assert costs.per_block >= 0.0
    assert costs.setup >= 0.0
