"""Records requests: metrics, decision records, spans, and a log line at their end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from opentelemetry.trace import Tracer

from common.contracts.clock import Clock
from common.contracts.errors import QuireError
from common.contracts.types import Decision, DecisionKind
from router.contracts.events import Finished, ValidatedRequest
from router.contracts.ports import DecisionSink
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.observe.metrics import RouterMetrics
from router.observe.record_spans import EndedRequest
from router.observe.request_tap import RequestTap
from router.observe.request_trace import RequestTrace
from router.observe.tail_keeper import TailKeeper
from router.observe.tail_rules import Rule
from router.observe.usual_gaps import UsualGaps

log = logging.getLogger(__name__)

# Output tokens of a sequence from which its gaps say something of its worker.
_STEADY_TOKENS: Final = 8


class Recorder:
    """Writes all records of requests; `new_id` makes ids of requests and decisions. `model` is what is served."""

    def __init__(
        self,
        metrics: RouterMetrics,
        decisions: DecisionSink,
        tracer: Tracer,
        clock: Clock,
        new_id: Callable[[], str],
        tail: TailKeeper | None = None,
        model: str = "",
    ) -> None:
        self.metrics, self.clock, self.new_id = metrics, clock, new_id
        self.tap, self._model = RequestTap(clock), model
        self._gaps = UsualGaps()
        self._decisions, self._tracer, self._tail = decisions, tracer, tail
        # The longest time between two events of output that is as promised.
        self.objective_itl = math.inf if tail is None else tail.objective.itl

    def trace(self, request: ValidatedRequest, request_id: str, begins: bool = True) -> RequestTrace:
        """Count a request, and return its spans; one that does not begin here goes on from another router."""
        self.metrics.of(request.caller.owner).requests.inc()
        arrived = request.arrived if begins else None
        return RequestTrace(self._tracer, self.clock, request, request_id, self._model, arrived)

    def finished(self, trace: RequestTrace, request_id: str, event: Finished) -> None:
        """Count the end of one sequence, and log its lengths for `quire advise-block-size`."""
        self.metrics.of(trace.owner).done(event, trace.trace_id)
        if log.isEnabledFor(logging.DEBUG):
            usage = event.usage
            lengths = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
            log.debug("finished: %s", event.reason, extra={"request_id": request_id, **lengths})

    def refused(self, trace: RequestTrace, request_id: str, error: QuireError) -> None:
        """Count a request that was refused at its arrival, and keep it."""
        self.metrics.of(trace.owner).refused(error)
        trace.end(str(error), error.reason)
        rules, ended_ns = self._tail.refuses() if self._tail is not None else (), self.clock.time_ns()
        traced = trace.built_id if rules or trace.recording else ""
        waited = self.clock.monotonic() - trace.request.arrived
        self.metrics.of_server.failed(trace.request, waited, error.reason, traced)
        if rules:
            self._keep(trace, EndedRequest(request_id, trace.began_ns, ended_ns, None, str(error)), rules)

    def ended(self, trace: RequestTrace, request_id: str, outcome: Outcome) -> None:
        """Record how a request ended, and keep it where a rule says so."""
        outcome = self._with_usual_gap(outcome)
        rules = self._tail.rules(outcome) if self._tail is not None else ()
        if rules:
            outcome = replace(outcome, kept=", ".join(rules))
        self._record_end(trace, request_id, outcome)
        traced = trace.built_id if rules or trace.recording else ""
        self.metrics.of_server.ended(trace.request, outcome, traced, trace.begins)
        if traced:
            self.metrics.of(trace.owner).traced(outcome, traced, trace.recording)
        if rules:
            ended_ns = self.clock.time_ns()
            began_ns = min(trace.began_ns, ended_ns - round(outcome.total_s * 1e9))
            self._keep(trace, EndedRequest(request_id, began_ns, ended_ns, outcome, outcome.failure), rules)

    def _with_usual_gap(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the usual inter-token latency of its worker, and count its own for later ones."""
        usual = self._gaps.usual(outcome.worker)
        if outcome.output_tokens >= _STEADY_TOKENS * max(1, outcome.sequences) and outcome.decode_gap:
            self._gaps.add(outcome.worker, outcome.decode_gap)
        return replace(outcome, usual_gap=usual)

    def _keep(self, trace: RequestTrace, ended: EndedRequest, rules: tuple[Rule, ...]) -> None:
        if self._tail is not None:
            self._tail.keep(trace.head(rules), ended)

    def _record_end(self, trace: RequestTrace, request_id: str, outcome: Outcome) -> None:
        """Record the outcome. It is not a span event: it may name other requests, and operators read it."""
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
                session=trace.request.session,
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
            session=trace.request.session,
        )
        self._decisions.record(decision)
        trace.decided(decision)
        return decision.decision_id
