"""Spans that are built from decision records: they go where the sampled ones go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import INVALID_SPAN_ID, SpanContext, Status, StatusCode, TraceFlags

from common.telemetry.decisions import add_decision
from common.telemetry.provider import origin_of
from common.telemetry.spans import Origin, RecordedSpan
from router.observe.gen_ai import Value
from router.observe.record_spans import EndedRequest, RecordSpan, spans_of

Attributes = Mapping[str, Value]

_IDS = RandomIdGenerator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class TraceHead:
    """The trace of a request: its id, the span of the client in it (if any), name and attributes of its own span."""

    trace_id: int
    parent: SpanContext | None
    name: str
    attributes: Attributes


def built_spans(head: TraceHead, ended: EndedRequest) -> list[RecordedSpan]:
    """Return the spans of a request, in the trace that its head names."""
    spans = spans_of(ended)
    contexts = [SpanContext(head.trace_id, _IDS.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)
                for _ in spans]  # fmt: skip
    return [_built(span, contexts, number, head) for number, span in enumerate(spans)]


def parent_span(context: SpanContext) -> SpanContext | None:
    """Return a span as the parent of another one; None for the invalid one."""
    return context if context.is_valid and context.span_id != INVALID_SPAN_ID else None


def _built(span: RecordSpan, contexts: Sequence[SpanContext], number: int, head: TraceHead) -> RecordedSpan:
    made = RecordedSpan(
        head.name if span.parent is None else span.name,
        contexts[number],
        head.parent if span.parent is None else contexts[span.parent],
        _origin(span.service),
        span.start_ns,
        _kept,
    )
    if span.parent is None:
        made.set_attributes(head.attributes)
    for each in span.decisions:
        add_decision(made, each)
    made.set_status(Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.OK))
    made.end(span.end_ns)
    return made


def _kept(_: RecordedSpan) -> None:
    """Leave a span that has ended to the caller of `built_spans`."""


@cache
def _origin(service: str) -> Origin:
    """Return the origin of spans about a service; the service made records, and the router the spans."""
    return origin_of(service, "from records")
