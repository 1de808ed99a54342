"""Follows a ring of decision records. The ring is the backlog: a slow reader costs no memory, it misses records.

Standard library only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.limits import MAX_DECISION_WATCHERS
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing, Passed

# Records of so many seconds come in one message, so that a busy service sends few.
_GATHERED_S: Final = 0.02
_RETRY_S: Final = 5.0


async def watched(ring: DecisionRing, query: DecisionQuery, after: int | None) -> AsyncGenerator[Passed, None]:
    """Yield what comes after the record of a number; None is the newest one. The first comes at once, often empty."""
    at, news = ring.made if after is None else min(after, ring.made), asyncio.Event()
    stop, first = ring.listen(news.set), True
    try:
        while True:
            news.clear()
            passed = ring.after(at, query)
            at = passed.number
            if first or passed.records or passed.lost:
                yield passed
            first = False
            if at == ring.made:
                await news.wait()
                await asyncio.sleep(_GATHERED_S)
            else:
                await asyncio.sleep(0)
    finally:
        stop()


class WatcherLimit:
    """Counts the watchers of one process. `what` they watch is part of the error, such as decisions."""

    def __init__(self, most: int = MAX_DECISION_WATCHERS, what: str = "decisions") -> None:
        self._most, self._what, self.watching = most, what, 0

    def __enter__(self) -> None:
        """Raise Overloaded when too many watch."""
        if self.watching >= self._most:
            words = f"{self.watching} watch the {self._what} of this process; at most {self._most}"
            raise Overloaded(QuotaViolation(f"{self._what}.watchers", words), _RETRY_S)
        self.watching += 1

    def __exit__(self, *_: object) -> None:
        self.watching -= 1
