"""Arrival times of requests in an open loop, from a seed alone: they do not depend on the system under load.

Gaps between arrivals follow a gamma distribution of mean 1 / rate and a given coefficient of variation (standard
deviation over mean). At 1 that is the exponential distribution, and the arrivals are a Poisson process. Above 1 they
come in bursts with pauses between them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

POISSON = 1.0


def arrivals(rate: float, seconds: float, cv: float = POISSON, seed: int = 0) -> Iterator[float]:
    """Yield the times, in seconds from the start, of all arrivals before `seconds`; `rate` is arrivals a second.

    The gamma distribution of shape k and scale s has mean k s and coefficient of variation k^-0.5.
    """
    rng = random.Random(f"arrivals/{seed}")
    shape = cv**-2.0
    scale = 1.0 / (rate * shape)
    now = rng.gammavariate(shape, scale)
    while now < seconds:
        yield now
        now += rng.gammavariate(shape, scale)


def paced(rate: float, count: int) -> Iterator[float]:
    """Yield `count` times at equal distances: how streams are opened that are all to be open at once."""
    return (index / rate for index in range(count))
