"""The decision records of kept requests, which outlive the rings of router and KV manager."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from common.contracts.types import Decision
from common.decisions.query import DecisionQuery
from common.decisions.ring import record_bytes


class KeptRecords:
    """Those of the newest kept requests, in about `max_bytes` of memory; found by the id of the request alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.bytes = max_bytes, 0
        self._requests: OrderedDict[str, dict[str, Decision]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, decisions: Iterable[Decision]) -> None:
        """Keep records of a request beside those that it has already; the oldest requests go when there is no room.

        A request without records takes no place, because a bound in bytes of records would not count it.
        """
        decisions = tuple(decisions)
        if not decisions:
            return
        held = self._requests.setdefault(request_id, {})
        self._requests.move_to_end(request_id)
        for each in decisions:
            if each.decision_id not in held:
                held[each.decision_id] = each
                self.bytes += record_bytes(each)
        while self.bytes > self._max_bytes:
            _, gone = self._requests.popitem(last=False)
            self.bytes -= sum(map(record_bytes, gone.values()))

    def find(self, query: DecisionQuery) -> list[Decision]:
        """Return the records under the id that a query names, if they pass its other filters."""
        held, others = self._requests.get(query.request_id, {}), replace(query, request_id="")
        return [each for each in held.values() if others.matches(each)]
