"""Spans that are built from decision records, as OpenTelemetry's: they go where the sampled ones go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import INVALID_SPAN_ID, SpanContext, Status, StatusCode, TraceFlags

from common.telemetry.decisions import EVENT, attributes_of
from router.core.record_spans import EndedRequest, RecordSpan, spans_of
from router.observe.gen_ai import Value

Attributes = Mapping[str, Value]

_IDS = RandomIdGenerator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class TraceHead:
    """The trace of a request: its id, the span of the client in it (if any), and the attributes of its own span."""

    trace_id: int
    parent: SpanContext | None
    attributes: Attributes


def readable_spans(head: TraceHead, ended: EndedRequest) -> list[ReadableSpan]:
    """Return the spans of a request, in the trace that its head names."""
    spans = spans_of(ended)
    contexts = [SpanContext(head.trace_id, _IDS.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)
                for _ in spans]  # fmt: skip
    return [_readable(span, contexts, number, head) for number, span in enumerate(spans)]


def parent_span(context: SpanContext) -> SpanContext | None:
    """Return a span as the parent of another one; None for the invalid one."""
    return context if context.is_valid and context.span_id != INVALID_SPAN_ID else None


def _readable(span: RecordSpan, contexts: Sequence[SpanContext], number: int, head: TraceHead) -> ReadableSpan:
    status = Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.OK)
    return ReadableSpan(
        name=span.name,
        context=contexts[number],
        parent=head.parent if span.parent is None else contexts[span.parent],
        resource=_resource(span.service),
        attributes=dict(head.attributes) if span.parent is None else {},
        events=[Event(EVENT, attributes_of(each), each.time_ns) for each in span.decisions],
        status=status,
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


@cache
def _resource(service: str) -> Resource:
    """Return the resource of spans about a service; the service made records, and the router the spans."""
    return Resource.create({"service.name": f"quire-{service}", "service.instance.id": "from records"})
