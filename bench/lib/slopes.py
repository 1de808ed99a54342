"""The slope of a figure, robust against outliers, and its 95 % confidence bounds; values may hang on each other.

Theil's estimate (1950): the median of the slopes of all pairs of values. Sen's bounds (1968): two of these slopes, by
the variance of Kendall's S. That variance holds for independent values. Where each value resembles the one before, it
is multiplied by (1 + r) / (1 - r), with r the autocorrelation of the residuals at lag 1 (Yue and Wang 2004).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Final, NamedTuple

# (place, value), by place: seconds, or requests
Life = list[tuple[float, float]]
_QUANTILE: Final = statistics.NormalDist().inv_cdf(0.975)
_MOST_CORRELATED: Final = 0.95


class Slope(NamedTuple):
    """Units of the value for each unit of the place. A bound is infinite where there are too few values for one."""

    middle: float
    low: float
    high: float


UNKNOWN: Final = Slope(0.0, -math.inf, math.inf)


def slope(lives: Sequence[Life]) -> Slope:
    """Return the common slope of all lives of a process; no pair has values of two lives."""
    pairs = [pair for life in lives for pair in combinations(life, 2)]
    slopes = sorted((after[1] - before[1]) / (after[0] - before[0]) for before, after in pairs if after[0] > before[0])
    if not slopes:
        return UNKNOWN
    middle = statistics.median(slopes)
    variance = sum(len(life) * (len(life) - 1) * (2 * len(life) + 5) / 18 for life in lives)
    spread = _QUANTILE * math.sqrt(variance * _inflation(lives, middle))
    first, last = math.floor((len(slopes) - spread) / 2) - 1, math.ceil((len(slopes) + spread) / 2)
    low = slopes[first] if first >= 0 else -math.inf
    high = slopes[last] if last < len(slopes) else math.inf
    return Slope(middle, low, high)


def _inflation(lives: Sequence[Life], middle: float) -> float:
    """Return by how much the variance is larger than that of independent values."""
    residuals = [_residuals(life, middle) for life in lives if life]
    squares = sum(each * each for life in residuals for each in life)
    if not squares:
        return 1.0
    together = sum(before * after for life in residuals for before, after in pairwise(life))
    correlation = min(max(0.0, together / squares), _MOST_CORRELATED)
    return (1.0 + correlation) / (1.0 - correlation)


def _residuals(life: Life, middle: float) -> list[float]:
    """Return what a line of this slope leaves of a life, with the mean taken away."""
    left = [value - middle * place for place, value in life]
    mean = statistics.fmean(left)
    return [each - mean for each in left]
