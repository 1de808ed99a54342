"""Records requests: metrics, decision records, spans, and a log line at their end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from opentelemetry.trace import Tracer

from common.clock import Clock
from common.types import Decision, DecisionKind
from router.core.diagnosis.outcome import Outcome, figures_of, texts_of
from router.core.events import Finished, ValidatedRequest
from router.observe.metrics import RouterMetrics
from router.observe.request_tap import RequestTap
from router.observe.request_trace import RequestTrace
from router.ports import DecisionSink

log = logging.getLogger(__name__)


class Recorder:
    """Writes all records of requests; `new_id` makes ids of requests and decisions."""

    def __init__(
        self, metrics: RouterMetrics, decisions: DecisionSink, tracer: Tracer, clock: Clock, new_id: Callable[[], str]
    ) -> None:
        self.metrics, self.clock, self.new_id = metrics, clock, new_id
        self.tap = RequestTap(clock)
        self._decisions, self._tracer = decisions, tracer

    def trace(self, request: ValidatedRequest, request_id: str) -> RequestTrace:
        """Count a request, and return its spans."""
        self.metrics.requests.inc()
        return RequestTrace(self._tracer, self.clock, request, request_id)

    def finished(self, request_id: str, event: Finished, trace_id: str) -> None:
        """Count the end of one sequence, and log its lengths for `quire advise-block-size`."""
        self.metrics.done(event, trace_id)
        if log.isEnabledFor(logging.DEBUG):
            usage = event.usage
            lengths = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
            log.debug("finished: %s", event.reason, extra={"request_id": request_id, **lengths})

    def ended(self, trace: RequestTrace, request_id: str, outcome: Outcome) -> None:
        """Record how a request ended. It is no event of a span: it may name other requests, and operators read it."""
        self._decisions.record(
            Decision(
                decision_id=self.new_id(),
                kind=DecisionKind.OUTCOME,
                time_ns=self.clock.time_ns(),
                chosen=outcome.ended,
                request_id=request_id,
                reasons=texts_of(outcome),
                figures=figures_of(outcome),
                traceparent=trace.traceparent,
                tenant=trace.owner,
                worker=outcome.worker,
            )
        )

    def decided(
        self,
        trace: RequestTrace,
        kind: DecisionKind,
        request_id: str,
        chosen: str,
        figures: tuple[tuple[str, float], ...],
        reasons: tuple[str, ...] = (),
    ) -> str:
        """Record a decision about a request; return its id."""
        decision = Decision(
            decision_id=self.new_id(),
            kind=kind,
            time_ns=self.clock.time_ns(),
            chosen=chosen,
            request_id=request_id,
            reasons=reasons,
            figures=figures,
            traceparent=trace.traceparent,
            tenant=trace.owner,
        )
        self._decisions.record(decision)
        trace.decided(decision)
        return decision.decision_id
