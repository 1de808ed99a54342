"""The spans of one request at the router.

chat MODEL              the whole request, from its arrival; text_completion or embeddings MODEL, as it is
  reading               the router's work on it before it is admitted
  queue > lookup        until a worker is chosen, with the decision, and in it the prefix lookup
  stream                the call of the worker, until the last token; parent of the worker's spans

Its parent is the span of the HTTP request or of the RPC. `lookup` is a client's span where Redis was asked, `stream`
always is, and the worker's `sequence` is the server's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from common.contracts.clock import Clock
from common.contracts.types import Decision
from common.telemetry import parent_of, traceparent_of, tracestate_of
from common.telemetry.decisions import add_decision
from common.telemetry.spans import UnsampledSpan
from router.contracts.events import Finished, ValidatedRequest
from router.contracts.index_answer import IndexAnswer, IndexSaid
from router.observe.gen_ai import Value, request_attributes, response_attributes, span_name
from router.observe.record_trace import TraceHead, parent_span
from router.observe.sampling import beginning

_NS: Final = 1_000_000_000
# Service graphs of today know the peer by the second name.
_REDIS: Final = {"db.system.name": "redis", "peer.service": "redis"}
_FAILED_LOOKUPS: Final = (IndexSaid.LATE, IndexSaid.FAILED)


class RequestTrace:
    """Costs nothing where the request is not sampled.

    `traceparent` names the request's span in records, and `tracestate` is what other systems keep in the trace.
    `begins` is False for a request that another router began.
    """

    def __init__(
        self,
        tracer: Tracer,
        clock: Clock,
        request: ValidatedRequest,
        request_id: str,
        model: str = "",
        arrived: float | None = None,
    ) -> None:
        """`arrived`: when a request came that begins here."""
        self._tracer, self._clock, self._model = tracer, clock, model
        self._ends: dict[int, Finished] = {}
        self.owner = request.caller.owner
        now_ns, read = clock.time_ns(), 0.0 if arrived is None else clock.monotonic() - arrived
        self.began_ns, self._queued_ns = now_ns - round(max(0.0, read) * _NS), now_ns
        with beginning(request.trace_id):
            parent = parent_of(request.traceparent, request.tracestate)
            name = span_name(request, model)
            self._span = tracer.start_span(name, parent, start_time=self.began_ns)
        self.recording = self._span.is_recording()
        context = self._span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if self.recording else ""
        within = set_span_in_context(self._span)
        self.traceparent, self.tracestate = (
            (traceparent_of(within), tracestate_of(within)) if self.recording else ("", "")
        )
        self.request, self._request_id, self._trace_id = request, request_id, context.trace_id
        self.begins = arrived is not None
        self._stream: Span | None = None
        self._fault = ""
        above = get_current_span(parent)
        # The span of an RPC or of an HTTP request is not recorded where this one is not.
        self._client = above.parent if isinstance(above, UnsampledSpan) else above.get_span_context()
        if self.recording:
            self._span.set_attributes(self._attributes())
        if self.recording and arrived is not None:
            tracer.start_span("reading", within, start_time=self.began_ns).end(now_ns)

    def _attributes(self) -> dict[str, Value]:
        """Return what the request's span says of it; empty names are left out."""
        request, constraint = self.request, self.request.sampling.constraint
        names = {
            "quire.correlation_id": request.correlation_id,
            "quire.tenant": self.owner,
            "quire.constraint": "" if constraint is None else constraint.kind.value,
        }
        return {
            "quire.request_id": self._request_id,
            "quire.prompt_tokens": len(request.prompt),
            "quire.max_tokens": request.sampling.max_tokens,
            "quire.sequences": request.sampling.n,
            "quire.priority": request.priority,
            **{name: value for name, value in names.items() if value},
            **request_attributes(request, self._model),
        }

    @property
    def built_id(self) -> str:
        """The id that a trace has which is built at the end, in hexadecimal; that of the spans if there are any."""
        return f"{self._trace_id:032x}"

    def head(self, rules: Iterable[str]) -> TraceHead | None:
        """Return the head of the trace that is built from records; None where there are spans."""
        if self.recording:
            return None
        attributes = {**self._attributes(), **self._response(), "quire.kept": ", ".join(rules)}
        if self._fault:
            attributes["error.type"] = self._fault
        name, client = span_name(self.request, self._model), self._client
        return TraceHead(self._trace_id, None if client is None else parent_span(client), name, attributes)

    def decided(self, decision: Decision) -> None:
        add_decision(self._span, decision)

    def lost(self) -> None:
        """Begin another `queue` span: the request waits for a worker again."""
        self._queued_ns = self._clock.time_ns()

    def placed(self, decision: Decision, began_ns: int, looked_up_ns: int, index: IndexAnswer) -> None:
        """Write `queue` and `lookup`; begin `stream` unless an earlier placement has begun it.

        Call it before the worker is called: `parent` is then what the worker's spans hang below.
        """
        if not self.recording:
            return
        queue = self._tracer.start_span("queue", set_span_in_context(self._span), start_time=self._queued_ns)
        self._look_up(queue, began_ns, looked_up_ns, index)
        add_decision(queue, decision)
        queue.end(decision.time_ns)
        self.called()

    def _look_up(self, queue: Span, began_ns: int, looked_up_ns: int, index: IndexAnswer) -> None:
        kind, attributes = (SpanKind.CLIENT, _REDIS) if index.asked else (SpanKind.INTERNAL, None)
        lookup = self._tracer.start_span("lookup", set_span_in_context(queue), kind, attributes, start_time=began_ns)
        if index.said in _FAILED_LOOKUPS:
            lookup.set_attribute("error.type", index.said.value)
            lookup.set_status(Status(StatusCode.ERROR, index.said.value))
        lookup.end(looked_up_ns)

    def called(self) -> None:
        """Begin `stream`, unless it has begun: a request that another router began is not placed here."""
        if self.recording and self._stream is None:
            self._stream = self._tracer.start_span("stream", set_span_in_context(self._span), SpanKind.CLIENT)

    @property
    def parent(self) -> str:
        """The traceparent for the worker; "" where the request is not sampled."""
        return "" if self._stream is None else traceparent_of(set_span_in_context(self._stream))

    def first_token(self) -> None:
        """Note when the client could see the first token."""
        if self._stream is not None:
            self._stream.add_event("first token", timestamp=self._clock.time_ns())

    def _response(self) -> dict[str, Value]:
        request = self.request
        response_id = request.response_id or self._request_id
        return response_attributes(self._ends, self._model, response_id, request.sampling.n)

    def finished(self, event: Finished) -> None:
        self._ends[event.index] = event
        if self._stream is not None:
            self._stream.add_event(
                "finished",
                {
                    "quire.index": event.index,
                    "quire.finish_reason": event.reason.value,
                    "quire.output_tokens": event.usage.output_tokens,
                    "quire.cached_tokens": event.usage.cached_tokens,
                    "quire.host_cached_tokens": event.usage.host_cached_tokens,
                    "quire.disk_cached_tokens": event.usage.disk_cached_tokens,
                    "quire.peer_cached_tokens": event.usage.peer_cached_tokens,
                    "quire.preemptions": event.usage.preemptions,
                },
                self._clock.time_ns(),
            )

    def end(self, failure: str, fault: str = "") -> None:
        """End all spans; `failure` says what went wrong and is "" for a success, `fault` is its reason."""
        self._fault = fault if failure else ""
        if not self.recording:
            return
        self._span.set_attributes(self._response())
        for span in (self._stream, self._span):
            if span is not None:
                if failure:
                    span.set_attribute("error.type", fault)
                span.set_status(Status(StatusCode.ERROR, failure) if failure else Status(StatusCode.OK))
                span.end(self._clock.time_ns())
