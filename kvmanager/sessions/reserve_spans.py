"""Spans of one session's waits for blocks. Requests that are not sampled leave nothing.

`kvmanager.reserve` is the server's half of the worker's `reserve`. It lasts from a sequence's arrival in the queue (or
its return to it by preemption) to its admission.
`kvmanager.preempt`, in the trace of the request that needed the blocks, lasts from the order to the victim's report.
The two requests' spans link to each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from grpc import StatusCode
from opentelemetry.trace import Link, Span, SpanKind, Tracer

from common.contracts.lease import Admit, GrantBatch, Inventory, Report, Reserve
from common.contracts.types import Decision, DecisionKind, FinishReason, SequenceId, SequencePhase
from common.telemetry import context_from, is_sampled, span_context_of
from common.telemetry.conventions import fail_server_span
from common.telemetry.decisions import add_decision

# A sequence that ends before it is admitted, as a call of the manager. The worker's own reasons are no fault of it.
_CODES: Final = {FinishReason.DEADLINE: StatusCode.DEADLINE_EXCEEDED}


class ReserveSpans:
    """Call `opened` at the start of a session, `reported` after each report, `close` at the end."""

    def __init__(self, tracer: Tracer, worker_id: str) -> None:
        self._tracer, self._worker_id = tracer, worker_id
        self._reserves: dict[SequenceId, Reserve] = {}
        self._waiting: dict[SequenceId, Span] = {}
        self._preempting: dict[SequenceId, tuple[Span | None, Decision]] = {}

    def opened(
        self, inventory: Inventory, batch: GrantBatch | None, decisions: Iterable[Decision], came_ns: int
    ) -> None:
        """Take over the sequences of an inventory; those that wait begin a span."""
        for entry in inventory.sequences:
            if is_sampled(entry.reserve.traceparent):
                self._reserves[entry.reserve.sequence] = entry.reserve
                if entry.phase is SequencePhase.WAITING:
                    self._begin(entry.reserve.sequence, (), came_ns)
        self._decided(batch, decisions)

    def reported(self, report: Report, batch: GrantBatch | None, decisions: Iterable[Decision], came_ns: int) -> None:
        """Begin and end spans according to a report and the grants that followed it.

        This is called after the answer has left. What begins here began when the report came, at `came_ns` of the
        wall clock.
        """
        for reserve in report.reserve:
            if is_sampled(reserve.traceparent):
                self._reserves[reserve.sequence] = reserve
                self._begin(reserve.sequence, (), came_ns)
        if self._reserves:
            for sequence, _ in report.preempted:
                self._given_up(sequence, came_ns)
            for sequence, reason in report.finished:
                code = _CODES.get(reason, StatusCode.CANCELLED)
                self._finished(sequence, code, f"finished ({reason}) before it was admitted")
            self._decided(batch, decisions)

    def close(self) -> None:
        """End the open spans: the session is lost."""
        for sequence in tuple(self._reserves):
            self._finished(sequence, StatusCode.UNAVAILABLE, "the session with the worker was lost")

    # ------------------------------------------------------------ one sequence

    def _begin(self, sequence: SequenceId, links: Iterable[Link], came_ns: int) -> None:
        reserve = self._reserves[sequence]
        attributes: dict[str, str | int] = {
            "quire.worker_id": self._worker_id,
            "quire.request_id": reserve.request_id,
            "quire.sequence": sequence,
            "quire.num_tokens": reserve.num_tokens,
            "quire.max_len": reserve.max_len,
            "quire.num_block_hashes": len(reserve.block_hashes),
        }
        self._waiting[sequence] = self._tracer.start_span(
            "kvmanager.reserve",
            context_from(reserve.traceparent, reserve.tracestate),
            SpanKind.SERVER,
            attributes,
            links=tuple(links),
            start_time=came_ns,
        )

    def _given_up(self, sequence: SequenceId, came_ns: int) -> None:
        """End the preemption's span: the victim waits again, and its new span links to the beneficiary."""
        span, decision = self._preempting.pop(sequence, (None, None))
        if span is not None:
            span.end()
        if sequence in self._reserves:
            self._begin(sequence, self._links(decision.beneficiary) if decision else (), came_ns)
            if decision is not None:
                add_decision(self._waiting[sequence], decision)

    def _finished(self, sequence: SequenceId, code: StatusCode, why: str) -> None:
        preempting, _ = self._preempting.pop(sequence, (None, None))
        if preempting is not None:
            preempting.end()
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            fail_server_span(waiting, code, why)
            waiting.end()
        self._reserves.pop(sequence, None)

    # ------------------------------------------------------------ decisions

    def _decided(self, batch: GrantBatch | None, decisions: Iterable[Decision]) -> None:
        if batch is None or not self._reserves:
            return
        by_id: dict[str, list[Decision]] = {}
        evictions: list[Decision] = []
        for decision in decisions:
            if decision.kind is DecisionKind.EVICTION:  # an eviction precedes the grant that needed it
                evictions.append(decision)
            else:
                by_id[decision.decision_id] = [*evictions, decision]
                evictions = []
        for admit in batch.admit:
            self._admitted(admit, by_id.get(admit.decision_id, ()))
        for preempt in batch.preempt:
            for decision in by_id.get(preempt.decision_id, ())[-1:]:
                self._preempting[preempt.sequence] = (self._begin_preemption(decision), decision)
        for sequence in batch.cancel:
            self._refused(sequence, decisions)

    def _admitted(self, admit: Admit, decisions: Iterable[Decision]) -> None:
        span = self._waiting.pop(admit.sequence, None)
        if span is None:
            return
        for decision in decisions:
            add_decision(span, decision)
        span.set_attribute("quire.cached_tokens", admit.cached_tokens)
        span.set_attribute("quire.miss_reason", admit.miss_reason)
        span.set_attribute("quire.blocks", len(admit.block_table))
        span.end()

    def _begin_preemption(self, decision: Decision) -> Span | None:
        beneficiary = self._reserve_of(decision.beneficiary)
        if beneficiary is None:
            return None
        span = self._tracer.start_span(
            "kvmanager.preempt",
            context_from(beneficiary.traceparent, beneficiary.tracestate),
            links=self._links(decision.victim),
        )
        add_decision(span, decision)
        return span

    def _refused(self, sequence: SequenceId, decisions: Iterable[Decision]) -> None:
        reserve = self._reserves.get(sequence)
        if reserve is None or sequence not in self._waiting:
            return
        reasons = []
        for decision in decisions:
            if decision.kind is DecisionKind.REJECTION and decision.request_id == reserve.request_id:
                add_decision(self._waiting[sequence], decision)
                reasons = list(decision.reasons)
        self._finished(sequence, StatusCode.INVALID_ARGUMENT, "refused: " + "; ".join(reasons))

    def _links(self, request_id: str) -> list[Link]:
        reserve = self._reserve_of(request_id)
        return [Link(span_context_of(reserve.traceparent), {"quire.request_id": request_id})] if reserve else []

    def _reserve_of(self, request_id: str) -> Reserve | None:
        return next((each for each in self._reserves.values() if each.request_id == request_id), None)
