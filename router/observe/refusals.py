"""Makes each answer with an error visible, once: a counter, a line of the log, and a record for `quire why ID`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from common.contracts.clock import Clock
from common.contracts.limits import CANCELLED_LINE_SECONDS, MAX_REFUSAL_LINES
from common.untrusted.rare_lines import RareLines
from router.contracts.refusals import FAULTS, Refusal, refusal_record
from router.observe.metrics import RouterMetrics
from router.observe.refused_records import RefusedRecords

log = logging.getLogger(__name__)

# Clients leave in the course of things: no list of refused requests has them, and few lines.
_CANCELLED: Final = "CANCELLED"


class Refusals:
    """All APIs call this with what they have answered; `new_id` makes ids of records."""

    def __init__(
        self,
        metrics: RouterMetrics,
        records: RefusedRecords,
        clock: Clock,
        new_id: Callable[[], str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._records, self._clock, self._new_id = metrics, records, clock, new_id
        self._lines = {reason: RareLines(1.0, MAX_REFUSAL_LINES, monotonic) for reason in FAULTS}
        self._lines[_CANCELLED] = RareLines(CANCELLED_LINE_SECONDS, 1, monotonic)

    def now_ns(self) -> int:
        return self._clock.time_ns()

    def note_refusal(self, refusal: Refusal, since_ns: int) -> None:
        """Count, log and record an answer to a request that came at a time; what has a record keeps that one alone."""
        self.count_refusal(refusal)
        self._log(refusal)
        if not self._records.has_end(refusal.request_id, since_ns):
            record = refusal_record(refusal, self._new_id(), self.now_ns())
            if refusal.reason == _CANCELLED:
                self._records.keep_record(record)
            else:
                self._records.record(record)
        if refusal.client_id:
            self._records.name(refusal.client_id, refusal.request_id, since_ns)

    def count_refusal(self, refusal: Refusal) -> None:
        """Count alone what a probe was answered."""
        self._metrics.refusals.labels(refusal.api, refusal.method, refusal.code, refusal.reason).inc()

    def _log(self, refusal: Refusal) -> None:
        held_back = self._lines[refusal.reason].next() if log.isEnabledFor(logging.INFO) else None
        if held_back is None:
            return
        whole = {
            "api": refusal.api,
            "method": refusal.method,
            "code": refusal.code,
            "reason": refusal.reason,
            "request_id": refusal.request_id,
            "client_id": refusal.client_id,
            "tenant": refusal.owner,
            "words": list(refusal.words),
            "lines_held_back": held_back,
        }
        extra = {name: value for name, value in whole.items() if value}
        log.info("refused: %s", FAULTS[refusal.reason], extra=extra)
