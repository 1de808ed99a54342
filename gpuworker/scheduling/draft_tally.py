"""Counts drafts by what guessed them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class DraftKind(StrEnum):
    """What guessed a draft: the client's prediction or the text itself, a grammar that forces it, or a draft model."""

    NGRAM = "ngram"
    FORCED = "forced"
    MODEL = "model"


class DraftTally(NamedTuple):
    """How many drafts were verified, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


DraftTallies = Mapping[DraftKind, DraftTally]


def added(tallies: DraftTallies, more: DraftTallies) -> dict[DraftKind, DraftTally]:
    """Return the sums by kind; `tallies` stays as it is."""
    sums = dict(tallies)
    for kind, (drafted, accepted) in more.items():
        before = sums.get(kind, DraftTally())
        sums[kind] = DraftTally(before.drafted + drafted, before.accepted + accepted)
    return sums


def total(tallies: DraftTallies) -> DraftTally:
    """Return the sum over all kinds."""
    return DraftTally(*map(sum, zip(*tallies.values(), strict=True))) if tallies else DraftTally()
