"""Who goes by age: one rule for every queue of requests, whatever its order is.

    7 admissions in the order of the queue  >  1 by age  >  7 in the order of the queue  >  ...

Old is who has waited for `max_wait`. Of each tenant the oldest may be next by age, whatever its priority. A tenant that
holds its share already has none while others wait. Of the rest the least load goes first, then the first arrival. So a
flood of higher priorities leaves one of eight admissions to those that wait, and a queue of old ones leaves it seven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

IN_TURN: Final = 7
"""Admissions in the order of the queue between two by age."""
DEFAULT_MAX_WAIT: Final = 30.0
"""Seconds."""
BY_AGE: Final = "is next by its age, because it waited for --max-wait"
"""The reason in the record of such an admission."""


class Arrived(Protocol):
    """What waits; arrivals are numbered."""

    @property
    def arrival(self) -> int: ...


WaitsT = TypeVar("WaitsT", bound=Arrived)


def is_old(waited: float, max_wait: float) -> bool:
    """Return whether so many seconds of waiting make old; with a `max_wait` of 0 nobody is."""
    return 0.0 < max_wait <= waited


def choose_by_age(
    oldest: Sequence[WaitsT], old: Callable[[WaitsT], bool], load: Callable[[WaitsT], float]
) -> WaitsT | None:
    """Return who is next by age, of the oldest of each tenant that waits; None where nobody is.

    `load` is what a tenant holds over its share: 1 is exactly the share.
    """
    found = [each for each in oldest if old(each)]
    if len(oldest) < 2:
        return found[0] if found else None
    below = [(held, each.arrival, each) for each in found if (held := load(each)) < 1.0]
    return min(below, key=lambda each: each[:2])[2] if below else None
