"""What the prefix index said of a request's prompt, in words: an index that was not asked did not fail to answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.contracts.index_answer import IndexSaid
from router.observe.diagnosis.outcome import Outcome

# With a place for the detail.
_WORDS: Final[Mapping[IndexSaid, str]] = {
    IndexSaid.LATE: "the prefix index in Redis did not answer within {}, and the router went on without it",
    IndexSaid.CUT: "the look-up in Redis ended at its limit of {}, before all of the prompt was looked up",
    IndexSaid.FAILED: "the prefix index in Redis failed ({})",
    IndexSaid.SKIPPED: "the router did not ask Redis ({})",
    IndexSaid.LOST: "the prefix index in Redis had lost its workers",
    IndexSaid.OFF: "the router has no prefix index",
}


def index_said(outcome: Outcome) -> tuple[IndexSaid, str]:
    """Return how the look-up of a request ended, and the detail of that."""
    said, _, detail = outcome.index.partition(": ")
    return (IndexSaid(said), detail) if said in set(IndexSaid) else (IndexSaid.ANSWERED, "")


def index_words(outcome: Outcome) -> str:
    """Return what became of a look-up, as the beginning of a sentence."""
    said, detail = index_said(outcome)
    return _WORDS.get(said, "the prefix index in Redis took so long to answer").format(detail)
