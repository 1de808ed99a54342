"""The slope of values: exact on lines, deaf to outliers, one line for each life, bounds that do not flatter."""

from __future__ import annotations

import math
import random

import pytest

from bench.lib.memory_watch import Life, slope


def line(steepness: float, intercept: float, count: int = 60, start: int = 0) -> Life:
    return [(float(place), intercept + steepness * place) for place in range(start, start + count)]


def walk(rng: random.Random, keeps: float, steepness: float = 0.0, count: int = 60) -> Life:
    """Return values that resemble the one before by `keeps`, with a drift."""
    found, noise = list[tuple[float, float]](), 0.0
    for place in range(count):
        noise = keeps * noise + rng.gauss(0.0, 1.0)
        found.append((float(place), noise + steepness * place))
    return found


def test_a_line_has_its_slope_and_no_error() -> None:
    assert slope([line(0.25, 100.0)]) == pytest.approx((0.25, 0.25, 0.25))


def test_a_restarted_process_begins_anew() -> None:
    """One line through both lives would fall steeply."""
    assert slope([line(0.1, 500.0), line(0.1, 40.0, start=60)]).middle == pytest.approx(0.1)


def test_a_fifth_of_outliers_changes_no_slope() -> None:
    values = [(place, value + (50.0 if int(place) % 5 == 0 else 0.0)) for place, value in line(0.25, 100.0)]
    found = slope([values])
    assert found.middle == pytest.approx(0.25)
    assert found.low > 0.0


@pytest.mark.parametrize("keeps", [0.0, 0.6])
def test_the_bounds_have_a_flat_line_between_them_in_about_19_of_20_runs(keeps: float) -> None:
    within = 0
    for seed in range(200):
        found = slope([walk(random.Random(seed), keeps)])
        within += found.low <= 0.0 <= found.high
    assert within >= 180


def test_a_leak_that_is_smaller_than_the_noise_is_found() -> None:
    """Over 60 values it adds 6 times the noise of one value."""
    found = sum(slope([walk(random.Random(seed), 0.3, steepness=0.1)]).low > 0.0 for seed in range(50))
    assert found >= 48


@pytest.mark.parametrize("lives", [[], [[]], [[(0.0, 1.0)]], [[(1.0, 1.0), (1.0, 2.0)]], [line(1.0, 0.0, count=3)]])
def test_too_few_values_bound_nothing(lives: list[Life]) -> None:
    assert slope(lives)[1:] == (-math.inf, math.inf)
