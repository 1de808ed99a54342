"""The tracer of Quire: OpenTelemetry's interface with little work for each span.

A span keeps what it is given, and becomes bytes of OTLP when it is delivered (`otlp_bytes.py`). The SDK's spans take a
lock and copy their attributes at each call. Sampling is decided for the first span of a process in a trace: spans below
a recorded one are recorded. A span belongs to one thread until it ends; sequences in attributes must not change later.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time_ns
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
)

from common.contracts.limits import MAX_SPAN_ITEMS
from common.telemetry.otlp_bytes import SpanEvent, resource_bytes, span_bytes

SCOPE: Final = "quire"
_SAMPLED, _UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_UNSET: Final = Status(StatusCode.UNSET)
_NUMBERS: Final = {kind: kind.value + 1 for kind in SpanKind}
_RUNS: Final = -1
_NONE: Final[Mapping[str, object]] = {}


class Origin:
    """The process that spans are about, as OTLP has it."""

    def __init__(self, resource: Resource) -> None:
        self.service = str(resource.attributes.get("service.name", "unknown"))
        self.encoded = resource_bytes(resource.attributes)


class RecordedSpan(Span):
    """A sampled span. Times are in ns; `end_time` is negative until it ends. After its end nothing changes."""

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        origin: Origin,
        start_time: int,
        ended: Callable[[RecordedSpan], object],
    ) -> None:
        self.name, self.context, self.parent, self.origin = name, context, parent, origin
        self.start_time, self.end_time, self.kind = start_time, _RUNS, SpanKind.INTERNAL
        self.attributes = dict[str, object]()
        self.links = list[Link]()
        self.events = list[SpanEvent]()
        self.dropped_events = self.dropped_links = 0
        self.status = _UNSET
        self._ended = ended

    @property
    def kind_number(self) -> int:
        """The number of its kind in OTLP."""
        return _NUMBERS[self.kind]

    def encoded(self) -> bytes:
        """Return it as a `Span` message of OTLP."""
        return span_bytes(self)

    def get_span_context(self) -> SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return self.end_time == _RUNS

    def set_attribute(self, key: str, value: Any) -> None:
        if self.end_time == _RUNS:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if self.end_time == _RUNS:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        """Add an event; the oldest one goes where there are MAX_SPAN_ITEMS."""
        if self.end_time != _RUNS:
            return
        if len(self.events) == MAX_SPAN_ITEMS:
            del self.events[0]
            self.dropped_events += 1
        self.events.append(SpanEvent(name, _now(timestamp), _NONE if attributes is None else attributes))

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        """Add a link; the oldest one goes where there are MAX_SPAN_ITEMS."""
        if self.end_time != _RUNS:
            return
        if len(self.links) >= MAX_SPAN_ITEMS:
            del self.links[0]
            self.dropped_links += 1
        self.links.append(Link(context, attributes))

    def update_name(self, name: str) -> None:
        if self.end_time == _RUNS:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status; OK is final."""
        made = status if isinstance(status, Status) else Status(status, description)
        final = self.end_time != _RUNS or self.status.status_code is StatusCode.OK
        if not final and made.status_code is not StatusCode.UNSET:
            self.status = made

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add an event with the type, the message and the stack of an exception."""
        whole = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**whole, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """End the span and hand it on; a second end changes nothing."""
        if self.end_time == _RUNS:
            self.end_time = _now(end_time)
            self._ended(self)


class UnsampledSpan(NonRecordingSpan):
    """A span that is not recorded, and its parent: what is traced below it in spite of it hangs there."""

    def __init__(self, context: SpanContext, parent: SpanContext | None) -> None:
        super().__init__(context)
        self.parent = parent


class SpanTracer(Tracer):
    """Makes spans, and hands each to `ended` when it ends, on the thread that ended it; `ended` must be quick."""

    def __init__(
        self, origin: Origin, sampler: Sampler, ids: IdGenerator, ended: Callable[[RecordedSpan], object]
    ) -> None:
        self._origin, self._sampler, self._ids, self._ended = origin, sampler, ids, ended

    def sampling(self, sampler: Sampler) -> SpanTracer:
        """Return a tracer of the same process that samples otherwise."""
        return SpanTracer(self._origin, sampler, self._ids, self._ended)

    def start_span(  # noqa: PLR0913 - the interface is OpenTelemetry's
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """Begin a span below the one in `context`: the current one by default."""
        above = trace.get_current_span(context)
        parent: SpanContext | None = above.get_span_context()
        state: TraceState | None
        if type(above) is RecordedSpan:
            trace_id, state = above.context.trace_id, above.context.trace_state
        else:
            parent = parent if parent is not None and parent.is_valid else None
            trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
            sampling = self._sampler.should_sample(context, trace_id, name, kind, attributes, links)
            state = sampling.trace_state
            if sampling.decision is not Decision.RECORD_AND_SAMPLE:
                context_ = SpanContext(trace_id, self._ids.generate_span_id(), False, _UNSAMPLED, state)
                return UnsampledSpan(context_, above.parent if isinstance(above, UnsampledSpan) else parent)
        made = SpanContext(trace_id, self._ids.generate_span_id(), False, _SAMPLED, state)
        span = RecordedSpan(name, made, parent, self._origin, _now(start_time), self._ended)
        span.kind = kind
        if attributes:
            span.attributes.update(attributes)
        if links:
            span.links += links[-MAX_SPAN_ITEMS:]
            span.dropped_links = len(links) - len(span.links)
        return span

    @contextmanager
    def start_as_current_span(self, name: str, *args: Any, **options: Any) -> Iterator[Span]:  # type: ignore[override]
        """Begin a span, let it be the current one within the block, and end it with the block."""
        use = {each: options.pop(each, True) for each in ("end_on_exit", "record_exception", "set_status_on_exception")}
        with trace.use_span(self.start_span(name, *args, **options), **use) as span:
            yield span


class UnsampledTracer(SpanTracer):
    """Samples nothing, whatever the traceparent says; trace ids are passed on, so that logs still have them."""

    def __init__(self, origin: Origin, ids: IdGenerator) -> None:
        super().__init__(origin, ALWAYS_OFF, ids, lambda _: None)

    def sampling(self, sampler: Sampler) -> SpanTracer:
        return self


def _now(time: int | None) -> int:
    """Return a given time, else the present one."""
    return time_ns() if time is None else time
