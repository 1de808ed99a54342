"""The newest spans of the whole suite, in memory, found by trace id or request id; `quire trace` draws them.

Spans come from the other services by OTLP (`otlp_receiver.py`) and from the router itself through StoreExporter. It is
safe to use from several threads, because span processors may run in threads of their own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.errors import NotFound
from quire.decision.v1 import decision_pb2
from router.observe.trace_codec import KeptSpan, from_otlp, from_sdk


class TraceStore:
    """A ring of `capacity` spans; the oldest go first, whatever their trace."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; expected 1 or more")
        self._capacity = capacity
        self._lock = threading.Lock()
        self._order: deque[tuple[str, str]] = deque()  # (trace id, span id), oldest first
        self._traces: dict[str, dict[str, KeptSpan]] = {}  # trace id -> span id -> span
        # request id -> (trace id, span id) of the newest span that names it
        self._named: dict[str, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, spans: Iterable[KeptSpan]) -> None:
        """Keep spans; a span that its sender sent twice replaces the first."""
        with self._lock:
            for span in spans:
                self._add(span)

    def add_otlp(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        self.add(list(from_otlp(request)))

    def trace(self, trace_id: str = "", request_id: str = "") -> decision_pb2.GetTraceResponse:
        """Return the known spans of a trace, named by its id or by a request in it, in the order of their start.

        Raises NotFound when there is none: not sampled, not delivered yet, or dropped from the ring.
        """
        with self._lock:
            trace_id = trace_id or self._trace_of(request_id)
            kept = list(self._traces.get(trace_id, {}).values())
        spans = [span.message() for span in kept]
        if not spans:
            named = f"trace {trace_id}" if trace_id else f"request {request_id}"
            what = f"no span of {named}; it was not sampled, is not delivered yet, or {self._capacity} newer spans"
            raise NotFound(f"{what} took its place")
        spans.sort(key=lambda span: (span.start_unix_nano, -span.end_unix_nano))
        return decision_pb2.GetTraceResponse(trace_id=trace_id, spans=spans)

    def trace_of(self, request_id: str) -> str:
        """Return the id of the trace that a request is in; "" when no span here names it."""
        with self._lock:
            return self._trace_of(request_id)

    def _trace_of(self, request_id: str) -> str:
        return self._named.get(request_id, ("", ""))[0]

    def _add(self, span: KeptSpan) -> None:
        trace_id = span.trace_id
        known = self._traces.get(trace_id, {})
        if span.span_id not in known:
            if len(self._order) == self._capacity:
                self._drop_oldest()
            self._order.append((trace_id, span.span_id))
            if span.request_id:
                self._named[span.request_id] = (trace_id, span.span_id)
        self._traces.setdefault(trace_id, known)[span.span_id] = span

    def _drop_oldest(self) -> None:
        trace_id, span_id = self._order.popleft()
        spans = self._traces[trace_id]
        request_id = spans.pop(span_id).request_id
        if not spans:
            del self._traces[trace_id]
        if self._named.get(request_id) == (trace_id, span_id):
            del self._named[request_id]


class StoreExporter(SpanExporter):
    """Puts the router's own spans into the store, without a network."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keep spans that have ended; this cannot fail."""
        self._store.add([from_sdk(span) for span in spans])
        return SpanExportResult.SUCCESS
