"""Arrival processes: the same from the same seed, of the rate and the coefficient of variation that were asked for."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from bench.open_loop.client import arrivals, paced


def test_a_seed_decides_every_arrival() -> None:
    first = list(arrivals(2.0, 3.0, cv=1.0, seed=7))
    assert [round(each, 6) for each in first] == [1.469974, 2.78333, 2.85174]
    assert first == list(arrivals(2.0, 3.0, cv=1.0, seed=7)) != list(arrivals(2.0, 3.0, cv=1.0, seed=8))


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(cv: float) -> None:
    times = list(arrivals(50.0, 4000.0, cv, seed=1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50.0, rel=0.03)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.03)


def test_poisson_counts_vary_as_much_as_their_mean_and_bursts_more() -> None:
    def dispersion(cv: float) -> float:
        counts = [0] * 4000
        for time in arrivals(20.0, 4000.0, cv, seed=2):
            counts[int(time)] += 1
        return statistics.pvariance(counts) / statistics.fmean(counts)

    assert dispersion(1.0) == pytest.approx(1.0, rel=0.06)
    assert dispersion(3.0) > 5.0


def test_paced_openings_are_equally_far_apart() -> None:
    assert list(paced(4.0, 3)) == [0.0, 0.25, 0.5]
