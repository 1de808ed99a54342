"""OpenTelemetry's spans, over OTLP or from this process's own tracer, to the message that Quire serves.

The store keeps a span as it came and converts it when a client asks for its trace. Few traces are asked for, and a
conversion takes 0.06 ms of the event loop, for a span of the router 0.2 ms. OpenTelemetry's own encoder turns the
router's spans into OTLP, so both ways share one conversion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan

from quire.decision.v1 import decision_pb2

REQUEST_ID: Final = "quire.request_id"
_STATUS = {trace_pb2.Status.STATUS_CODE_OK: "ok", trace_pb2.Status.STATUS_CODE_ERROR: "error"}


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span under its ids; `request_id` is "" where its attributes name no request."""

    trace_id: str
    span_id: str
    request_id: str
    message: Callable[[], decision_pb2.Span]


def from_sdk(span: ReadableSpan) -> KeptSpan:
    context = span.context
    request_id = (span.attributes or {}).get(REQUEST_ID, "")
    return KeptSpan(f"{context.trace_id:032x}", f"{context.span_id:016x}", str(request_id), partial(_sdk_span, span))


def _sdk_span(span: ReadableSpan) -> decision_pb2.Span:
    (kept,) = from_otlp(encode_spans([span]))
    return kept.message()


def from_otlp(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[KeptSpan]:
    for resource_spans in request.resource_spans:
        service = _attributes(resource_spans.resource.attributes).get("service.name", "unknown")
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                named = (each.value.string_value for each in span.attributes if each.key == REQUEST_ID)
                message = partial(_otlp_span, span, service)
                yield KeptSpan(span.trace_id.hex(), span.span_id.hex(), next(named, ""), message)


def _otlp_span(span: trace_pb2.Span, service: str) -> decision_pb2.Span:
    return decision_pb2.Span(
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        service=service,
        name=span.name,
        start_unix_nano=span.start_time_unix_nano,
        end_unix_nano=span.end_time_unix_nano,
        status=_STATUS.get(span.status.code, "unset"),
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        events=[
            decision_pb2.SpanEvent(
                name=event.name, time_unix_nano=event.time_unix_nano, attributes=_attributes(event.attributes)
            )
            for event in span.events
        ],
        links=[f"{link.trace_id.hex()}:{link.span_id.hex()}" for link in span.links],
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    return {pair.key: _text(_plain(pair.value)) for pair in pairs}


def _text(value: object) -> str:
    """Return an attribute's value as text: strings as they are, bytes in hexadecimal, everything else as JSON."""
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: common_pb2.AnyValue) -> object:
    match value.WhichOneof("value"):
        case "array_value":
            return [_plain(each) for each in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return value.bytes_value
        case None:
            return None
        case kind:
            plain: object = getattr(value, kind)
            return plain
