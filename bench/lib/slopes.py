"""The slope of a figure over time, with an honest standard error: several lives of one process, values that hang on.

Ordinary least squares with one intercept for each life (fixed effects). Values a second apart are not independent, so
that the usual standard error would be too small. Means over blocks of time stand in for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

# (seconds, value), by time
Life = list[tuple[float, float]]
_BLOCK_SECONDS: Final = 30.0


def slope(lives: Sequence[Life], block: float = _BLOCK_SECONDS) -> tuple[float, float]:
    """Return the common slope of all lives, in units a second, and its standard error; infinite where undetermined."""
    centred = [pair for life in lives for pair in _centred(list(_means(life, block)))]
    spread = sum(time * time for time, _ in centred)
    if spread == 0.0:
        return 0.0, math.inf
    steepness = sum(time * value for time, value in centred) / spread
    freedom = len(centred) - len([life for life in lives if life]) - 1
    if freedom < 1:
        return steepness, math.inf
    residual = sum((value - steepness * time) ** 2 for time, value in centred)
    return steepness, math.sqrt(residual / freedom / spread)


def _means(life: Life, block: float) -> Iterator[tuple[float, float]]:
    """Yield the mean time and the mean value of each block of time."""
    for _, pairs in groupby(life, key=lambda pair: pair[0] // block):
        times, values = zip(*pairs, strict=True)
        yield sum(times) / len(times), sum(values) / len(values)


def _centred(pairs: Life) -> Life:
    """Return the pairs with the means taken away: that is one intercept for each life."""
    count = max(1, len(pairs))
    time, value = sum(pair[0] for pair in pairs) / count, sum(pair[1] for pair in pairs) / count
    return [(each - time, other - value) for each, other in pairs]
