"""The records of refused requests: all of them by the id of the request, and so many a second in the decision ring.

A flood of wrong requests costs its client next to nothing, and would push all other records out of the ring. So only
some enter it. Beside it stand the newest of each tenant and reason: a flood pushes out those that are like it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from common.contracts.limits import (
    ALIKE_REFUSALS_BURST,
    ALIKE_REFUSALS_PER_SECOND,
    MAX_REFUSAL_GROUPS,
    REFUSALS_BURST,
    REFUSALS_PER_SECOND,
)
from common.contracts.types import Decision, DecisionKind
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing
from router.observe.kept_records import KeptRecords
from router.observe.sampling import Allowance

# What a record in the ring says of those before it that are not there.
LEFT_OUT: Final = "left_out"
_ENDS: Final = (DecisionKind.REJECTION, DecisionKind.OUTCOME)


class RefusedRecords:
    """The DecisionSink of a router: passes records on to the ring, those of refused requests within bounds.

    `max_bytes` is the memory of what is kept beside the ring, about.
    """

    def __init__(self, ring: DecisionRing, max_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ring, self._monotonic = ring, monotonic
        self._each = max_bytes // MAX_REFUSAL_GROUPS
        self._all = Allowance(REFUSALS_PER_SECOND, REFUSALS_BURST, monotonic)
        # By tenant and what refused them; the one that came last is the last.
        self._groups: OrderedDict[tuple[str, str], _Alike] = OrderedDict()

    def record(self, decision: Decision) -> None:
        if decision.kind is not DecisionKind.REJECTION:
            self._ring.record(decision)
            return
        alike = self.keep_record(decision)
        if alike.allowance.take() and self._all.take():
            left_out, alike.left_out = alike.left_out, 0
            more = ((LEFT_OUT, float(left_out)),) if left_out else ()
            self._ring.record(replace(decision, figures=(*decision.figures, *more)) if more else decision, quiet=True)
        else:
            alike.left_out += 1

    def keep_record(self, decision: Decision) -> _Alike:
        """Keep the record of a refused request beside the ring alone."""
        alike = self._alike(decision)
        alike.records.add(decision.request_id, (decision,))
        return alike

    def name(self, client_id: str, request_id: str, since_ns: int) -> None:
        """Let the records of a refused request be found by its client's name for it too."""
        for each in self.find(DecisionQuery(request_id, DecisionKind.REJECTION, since_ns=since_ns)):
            self._alike(each).records.add(client_id, (each,))

    def has_end(self, request_id: str, since_ns: int) -> bool:
        """Return whether a record since a time says how a request ended, or that it was refused."""
        query = DecisionQuery(request_id, since_ns=since_ns)
        ends = (each.kind in _ENDS for _, each in self._ring.page(query).records)
        return any(ends) or bool(self.find(query))

    def find(self, query: DecisionQuery) -> list[Decision]:
        """Return the records of the refused requests with the id that a query names, oldest first."""
        found = [each for alike in self._groups.values() for each in alike.records.find(query)]
        return sorted(found, key=lambda each: each.time_ns)

    def _alike(self, decision: Decision) -> _Alike:
        key = decision.tenant, decision.chosen
        if key not in self._groups:
            self._groups[key] = _Alike(self._each, self._monotonic)
            if len(self._groups) > MAX_REFUSAL_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]


class _Alike:
    """The refused requests of one tenant and reason."""

    def __init__(self, max_bytes: int, monotonic: Callable[[], float]) -> None:
        self.records = KeptRecords(max_bytes)
        self.allowance = Allowance(ALIKE_REFUSALS_PER_SECOND, ALIKE_REFUSALS_BURST, monotonic)
        self.left_out = 0
