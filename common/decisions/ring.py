"""The bounded ring of decision records that each service keeps: why a request went somewhere, waited or lost blocks.

Standard library only. A record is found by every request that it concerns: its subject, the victim and the
beneficiary, so that "who preempted mine?" and "whom did mine preempt?" are one query.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from common.decisions.log_line import log_decision
from common.types import Decision

DEFAULT_LIMIT = 100


class DecisionRing:
    """The newest `capacity` records, oldest first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; expected 1 or more")
        self._capacity = capacity
        self._records: deque[Decision] = deque()
        self._by_request: dict[str, deque[Decision]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._records)

    def record(self, decision: Decision) -> None:
        """Keep a record, and log it; the oldest one goes when the ring is full."""
        log_decision(decision)
        if len(self._records) == self._capacity:
            self._forget(self._records.popleft())
        self._records.append(decision)
        for request_id in _concerned(decision):
            self._by_request.setdefault(request_id, deque()).append(decision)

    def find(self, request_id: str = "", kind: str = "", limit: int = 0) -> list[Decision]:
        """Return the newest `limit` records (0: a hundred) that match both filters, oldest first; "" matches all."""
        records = self._by_request.get(request_id, ()) if request_id else self._records
        found: list[Decision] = []
        for decision in reversed(records):
            if kind in ("", decision.kind):
                found.append(decision)
                if len(found) == (limit or DEFAULT_LIMIT):
                    break
        found.reverse()
        return found

    def _forget(self, decision: Decision) -> None:
        for request_id in _concerned(decision):
            records = self._by_request[request_id]
            # Records leave this index in the order in which they came, as in the ring.
            records.popleft()
            if not records:
                del self._by_request[request_id]


def _concerned(decision: Decision) -> set[str]:
    return {decision.request_id, decision.victim, decision.beneficiary} - {""}
