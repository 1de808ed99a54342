"""What requests say of contents: priorities, each with an end, and how those of several requests add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Final

from common.contracts.lease import DEFAULT_RETENTION_PRIORITY

_USUAL: Final = DEFAULT_RETENTION_PRIORITY
_MOST_TERMS: Final = 4
"""Of one content. Each release compares them with its own."""

Term = tuple[int, float]
"""A priority, and the time at which it ends."""
Terms = tuple[Term, ...]
"""Of falling priority and rising end: all above 35, or one below it."""


class Fate(StrEnum):
    """What became of a mark by the time its block was evicted."""

    RETAINED = "no block without retention was left"
    OVER = "its retention was over"
    BEYOND = "its tenant retained more than its share of the pool"
    CROWDED = "all tenants retained more than half of the pool"
    LOWERED = "its request gave it a low priority"
    PINNED = "an operator pinned it, and no block without a pin was left"
    UNPINNED = "its pin was removed or over"


class Mark:
    """What requests said of contents: terms, and who said so last. `fate` is set once there is no term left.

    Contents share a mark that one request made: it changes by time alone.
    """

    __slots__ = ("fate", "tenant", "terms")

    def __init__(self, terms: Terms, tenant: str, fate: Fate | None = None) -> None:
        self.terms, self.tenant, self.fate = terms, tenant, fate


def segments(asked: list[tuple[int, int, Term]]) -> Iterator[tuple[int, int, Terms]]:
    """Yield the blocks between the ends of ranges, and the terms that all blocks of such a part get."""
    cuts = sorted({cut for first, end, _ in asked for cut in (first, end)})
    for first, end in pairwise(cuts):
        terms = [term for begin, until, term in asked if begin <= first and end <= until]
        raised = _needed(each for each in terms if each[0] > _USUAL)
        if terms:
            yield first, end, raised or (terms[-1],)


def _needed(raised: Iterable[Term]) -> Terms:
    """Return the terms that say more than others do, in their order. Of many, the highest and the longest stay."""
    kept = list[Term]()
    for each in sorted(raised, reverse=True):
        if not kept or each[1] > kept[-1][1]:
            kept.append(each)
    return tuple(kept if len(kept) <= _MOST_TERMS else (*kept[: _MOST_TERMS - 1], kept[-1]))


def merged(old: Mark, fresh: Mark, now: float) -> Mark:
    """Return the mark of contents that have an old one. What is retained stays so, whatever another request says."""
    raised = tuple(each for each in old.terms if each[1] > now and each[0] > _USUAL)
    if not raised:
        return fresh
    if fresh.terms[0][0] < _USUAL:
        return old
    terms = _needed((*raised, *fresh.terms))
    if terms == raised:
        return old
    return fresh if terms == fresh.terms else Mark(terms, fresh.tenant)


def renew(mark: Mark, now: float) -> bool:
    """Drop the terms of a mark that are over, and return whether one is left."""
    if mark.terms and mark.terms[0][1] <= now:
        mark.terms = tuple(each for each in mark.terms if each[1] > now)
        if not mark.terms:
            mark.fate = Fate.OVER
    return bool(mark.terms)
