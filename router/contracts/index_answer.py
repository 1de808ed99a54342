"""What the prefix index said of a prompt, or why it said nothing: an index that was not asked is not to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class IndexSaid(StrEnum):
    """How a look-up ended.

    EMPTY: Redis answered, and no worker has published a block that this router ever asked for. LOST: it named workers
    before, and names none any more. CUT: the limit came after a part of the answers. LATE: it came before the first
    one. FAILED: Redis answered with an error, or could not be reached. SKIPPED: Redis was not asked, because look-ups
    kept failing. OFF: no Redis is configured.
    """

    ANSWERED = "answered"
    EMPTY = "empty"
    LOST = "lost"
    CUT = "cut"
    LATE = "late"
    FAILED = "failed"
    SKIPPED = "skipped"
    OFF = "off"


_UNASKED: Final = frozenset({IndexSaid.SKIPPED, IndexSaid.OFF})
_ANSWERS: Final = frozenset({IndexSaid.ANSWERED, IndexSaid.EMPTY, IndexSaid.CUT})


@dataclass(frozen=True, slots=True)
class IndexAnswer:
    """Leading blocks that each worker has, None where the index names no worker.

    `detail` is in words: the limit, the failure, or why Redis was not asked. `seconds` are those of the look-up, up to
    its limit: what an event loop took beyond that does not count.
    """

    hits: Mapping[str, int] | None = None
    said: IndexSaid = IndexSaid.ANSWERED
    detail: str = ""
    seconds: float = 0.0

    @property
    def answered(self) -> bool:
        return self.said in _ANSWERS

    @property
    def asked(self) -> bool:
        """Whether Redis was asked."""
        return self.said not in _UNASKED and self != NOTHING_ASKED

    @property
    def words(self) -> str:
        """The text of records; "" for a whole answer."""
        if self.said is IndexSaid.ANSWERED:
            return ""
        return f"{self.said}: {self.detail}" if self.detail else self.said.value


# Of a request that has no block to look up.
NOTHING_ASKED: Final = IndexAnswer()
