"""The newest spans of the whole suite, in memory, found by trace id or request id; `quire trace` draws them.

Spans come from the other services by OTLP (`otlp_receiver.py`) and from the router itself. Count and bytes are bounded:
for all spans, for one sender, and for one sender in one trace. It is safe to use from several threads, because a span
is handed over on the thread that ended it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from common.contracts.errors import NotFound
from common.contracts.limits import MAX_SENDER_SHARE, MAX_TRACE_BYTES, MAX_TRACE_SPANS
from common.telemetry.spans import RecordedSpan
from quire.decision.v1 import decision_pb2
from router.observe.trace_codec import KeptSpan, from_otlp, from_own

Key = tuple[str, str]  # trace id, span id


# Which spans a full store gives up: the oldest, but first those of a sender that holds more than its share.
# Sizes are bytes. A sender that floods the store pushes out its own spans, so the newest traces of the others stay.
@dataclass(slots=True)
class _Sender:
    keys: deque[Key] = field(default_factory=deque)  # oldest first
    bytes: int = 0


class SpanRing:
    """The order and the sizes of kept spans: at most `capacity`, and at most `max_bytes`."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        if capacity < 1 or max_bytes < 1:
            raise ValueError(f"capacity is {capacity} and max_bytes is {max_bytes}; expected 1 or more")
        self.capacity, self.max_bytes = capacity, max_bytes
        # What one sender may hold while the ring is full.
        self._most_spans, self._most_bytes = MAX_SENDER_SHARE * capacity, MAX_SENDER_SHARE * max_bytes
        self.bytes = 0
        self._spans: OrderedDict[Key, tuple[str, int]] = OrderedDict()  # -> sender, size; oldest first
        self._senders: dict[str, _Sender] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, key: Key, sender: str, size: int) -> Iterator[Key]:
        """Yield the spans that make room, each removed already; then note a span that is not here yet."""
        while self._spans and (len(self._spans) == self.capacity or self.bytes + size > self.max_bytes):
            yield self._remove_oldest(self._crowder(sender, size))
        held = self._senders.get(sender)
        if held is None:
            held = self._senders[sender] = _Sender()
        held.keys.append(key)
        held.bytes += size
        self._spans[key] = sender, size
        self.bytes += size

    def resize(self, key: Key, size: int) -> None:
        """Note the new size of a span that its sender sent again."""
        sender, before = self._spans[key]
        self._spans[key] = sender, size
        self._senders[sender].bytes += size - before
        self.bytes += size - before

    def _crowder(self, sender: str, size: int) -> str | None:
        """Return the sender of the next span where it holds more than its share of the ring."""
        held = self._senders.get(sender)
        if held is None or not held.keys:
            return None
        crowds = held.bytes + size > self._most_bytes or len(held.keys) + 1 > self._most_spans
        return sender if crowds else None

    def _remove_oldest(self, sender: str | None) -> Key:
        """Remove the oldest span of a sender, or of all."""
        if sender is None:
            key = next(iter(self._spans))
            sender = self._spans[key][0]
        held = self._senders[sender]
        key = held.keys.popleft()  # the oldest of all is the oldest of its sender
        _, size = self._spans.pop(key)
        held.bytes -= size
        self.bytes -= size
        if not held.keys:
            del self._senders[sender]
        return key


DEFAULT_RING_BYTES: Final = 64 << 20
# The sender of the router's own spans; no other sender has this name.
OWN: Final = ""


@dataclass(slots=True)
class _Trace:
    """The spans of a trace with their senders, and the spans and bytes of each sender."""

    spans: dict[str, tuple[KeptSpan, str]] = field(default_factory=dict)  # span id -> span, sender
    held: dict[str, tuple[int, int]] = field(default_factory=dict)  # sender -> spans, bytes

    def has_room(self, span: KeptSpan, sender: str) -> bool:
        spans, size = self.held.get(sender, (0, 0))
        return spans < MAX_TRACE_SPANS and size + span.size <= MAX_TRACE_BYTES

    def count(self, sender: str, spans: int, size: int) -> None:
        before = self.held.get(sender, (0, 0))
        held = before[0] + spans, before[1] + size
        if held[0]:
            self.held[sender] = held
        else:
            del self.held[sender]


class TraceStore:
    """A ring of at most `capacity` spans and `max_bytes` bytes."""

    def __init__(self, capacity: int, max_bytes: int = DEFAULT_RING_BYTES) -> None:
        self._ring = SpanRing(capacity, max_bytes)
        self._lock = threading.Lock()
        self._traces: dict[str, _Trace] = {}
        # (tenant, request id) -> (trace id, span id) of the newest span that names it; "" stands for any tenant
        self._named: dict[tuple[str, str], tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def names(self) -> int:
        """How many names lead to spans."""
        return len(self._named)

    def senders(self, trace_id: str) -> int:
        """Return how many senders have spans in a trace."""
        return len(self._traces[trace_id].held)

    @property
    def bytes(self) -> int:
        """About the memory of the spans."""
        return self._ring.bytes

    def add_span(self, spans: Iterable[KeptSpan], sender: str = OWN) -> int:
        """Keep spans; return how many were refused. A span that its sender sent twice replaces the first."""
        with self._lock:
            return sum(not self._add(span, sender) for span in spans)

    def add_own(self, span: RecordedSpan) -> None:
        """Keep a span of the router itself."""
        self.add_span((from_own(span),))

    def add_otlp(self, request: trace_service_pb2.ExportTraceServiceRequest, sender: str) -> int:
        """Keep the spans of a request of another service; return how many were refused."""
        return self.add_span(list(from_otlp(request)), sender)

    def trace(self, trace_id: str = "", request_id: str = "", tenant: str = "") -> decision_pb2.GetTraceResponse:
        """Return the known spans of a trace, named by its id or by a request in it, in the order of their start.

        With a tenant the request is one of this tenant. Raises NotFound when there is none: not sampled, not delivered
        yet, or dropped from the ring.
        """
        with self._lock:
            trace_id = trace_id or self._trace_of(request_id, tenant)
            found = self._traces.get(trace_id)
            kept = [span for span, _ in found.spans.values()] if found else []
        spans = [span.message() for span in kept]
        if not spans:
            named = f"trace {trace_id}" if trace_id else f"request {request_id}"
            what = f"no span of {named}; it was not sampled, is not delivered yet, or newer spans took its place"
            raise NotFound(f"{what} (room for {self._ring.capacity} spans and {self._ring.max_bytes} bytes)")
        spans.sort(key=lambda span: (span.start_unix_nano, -span.end_unix_nano))
        return decision_pb2.GetTraceResponse(trace_id=trace_id, spans=spans)

    def trace_of(self, request_id: str, tenant: str = "") -> str:
        """Return the id of the trace that a request is in; "" when no span here names it."""
        with self._lock:
            return self._trace_of(request_id, tenant)

    def _trace_of(self, request_id: str, tenant: str) -> str:
        return self._named.get((tenant, request_id), ("", ""))[0]

    def _add(self, span: KeptSpan, sender: str) -> bool:
        key = span.trace_id, span.span_id
        trace = self._traces.get(span.trace_id)
        if trace is not None and span.span_id in trace.spans:
            self._replace(trace, span, sender)
            return True
        if trace is not None and not trace.has_room(span, sender):
            return False
        for trace_id, span_id in self._ring.add(key, sender, span.size):
            self._drop(trace_id, span_id)
        trace = self._traces.get(span.trace_id)  # it may have been dropped with its last span
        if trace is None:
            trace = self._traces[span.trace_id] = _Trace()
        trace.spans[span.span_id] = span, sender
        trace.count(sender, 1, span.size)
        self._name(span)
        return True

    def _name(self, span: KeptSpan) -> None:
        for name in _names(span):
            self._named[name] = span.trace_id, span.span_id

    def _unname(self, span: KeptSpan) -> None:
        """Forget the names of a span that is gone, but not those that a newer span has too."""
        for name in _names(span):
            if self._named.get(name) == (span.trace_id, span.span_id):
                del self._named[name]

    def _replace(self, trace: _Trace, span: KeptSpan, sender: str) -> None:
        """Replace a span, unless another sender sent the first one: no sender changes the spans of another.

        A collector may send back what its services have sent here too.
        """
        before, owner = trace.spans[span.span_id]
        if owner != sender:
            return
        self._unname(before)
        trace.spans[span.span_id] = span, sender
        self._name(span)
        trace.count(sender, 0, span.size - before.size)
        self._ring.resize((span.trace_id, span.span_id), span.size)

    def _drop(self, trace_id: str, span_id: str) -> None:
        trace = self._traces[trace_id]
        span, sender = trace.spans.pop(span_id)
        trace.count(sender, -1, -span.size)
        if not trace.spans:
            del self._traces[trace_id]
        self._unname(span)


def _names(span: KeptSpan) -> Collection[tuple[str, str]]:
    """Return the names under which a span's trace is found: the request's ids, for any tenant and for its own."""
    if not span.request_id and not span.correlation_id:
        return ()
    ids = {span.request_id, span.correlation_id} - {""}
    return {(tenant, each) for each in ids for tenant in ("", span.tenant)}
