"""The slope of values over time: exact on lines, one intercept for each life, an error that does not flatter."""

from __future__ import annotations

import math
import random

import pytest

from bench.lib.slopes import Life, slope


def line(steepness: float, intercept: float, seconds: int = 600, start: int = 0) -> Life:
    return [(float(time), intercept + steepness * time) for time in range(start, start + seconds)]


def test_a_line_has_its_slope_and_no_error() -> None:
    steepness, error = slope([line(0.25, 100.0)])
    assert steepness == pytest.approx(0.25)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_a_restarted_process_begins_anew() -> None:
    """One line through both lives would fall steeply."""
    steepness, _ = slope([line(0.1, 500.0), line(0.1, 40.0, start=600)])
    assert steepness == pytest.approx(0.1)


def test_values_that_hang_on_do_not_flatter_the_error() -> None:
    """A walk without drift: its slope lies within three standard errors of 0 nearly always."""
    within = 0
    for seed in range(40):
        rng = random.Random(seed)
        noise = [0.0]
        for _ in range(1800):
            noise.append(0.95 * noise[-1] + rng.gauss(0.0, 1.0))
        steepness, error = slope([list(zip(map(float, range(1801)), noise, strict=True))])
        within += abs(steepness) <= 3 * error
    assert within >= 38


@pytest.mark.parametrize("lives", [[], [[]], [[(0.0, 1.0)]], [line(1.0, 0.0, seconds=45)]])
def test_too_few_values_show_nothing(lives: list[Life]) -> None:
    assert slope(lives)[1] == math.inf
