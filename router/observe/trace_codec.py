"""Spans, over OTLP or from this process's own tracer, to the message that Quire serves.

The store keeps a span as it came and converts it when a client asks for its trace. Few traces are asked for, and a
conversion takes 0.06 ms of the event loop. A span that came over OTLP is kept as bytes of its own: its message would
keep all spans that came with it in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from common.contracts.limits import MAX_ATTRIBUTE_CHARS, MAX_SPAN_BYTES, MAX_SPAN_ITEMS
from common.decisions.ring import record_bytes
from common.telemetry.decisions import DecisionAttributes
from common.telemetry.spans import RecordedSpan
from common.untrusted.ids import is_id
from quire.decision.v1 import decision_pb2

TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
# The attribute of a span that was cut; its value is the number of bytes that are missing.
CUT: Final = "quire.cut_bytes"
# Room for the fields of a span that are not items.
_HEAD_BYTES: Final = 16 << 10


# Cuts spans that other services send to a bounded size: long texts at their end, and items beyond what fits.
def has_ids(span: trace_pb2.Span) -> bool:
    """Return whether the ids of a span have the lengths that OpenTelemetry gives them."""
    ids = len(span.trace_id), len(span.span_id)
    return ids == (TRACE_ID_BYTES, SPAN_ID_BYTES) and len(span.parent_span_id) in (0, SPAN_ID_BYTES)


def bounded(span: trace_pb2.Span) -> trace_pb2.Span:
    """Return the span itself where nothing in it can be too long, else a copy of at most MAX_SPAN_BYTES."""
    size = span.ByteSize()
    if size <= MAX_ATTRIBUTE_CHARS:
        return span
    cut = _head(span)
    room = MAX_SPAN_BYTES - _HEAD_BYTES
    for items, kept in (
        (map(_attribute, span.attributes[:MAX_SPAN_ITEMS]), cut.attributes),
        (map(_event, span.events[:MAX_SPAN_ITEMS]), cut.events),
        (iter(span.links[:MAX_SPAN_ITEMS]), cut.links),
    ):
        room = _fill(kept, items, room)
    missing = size - cut.ByteSize()
    if missing > 0:
        cut.attributes.add(key=CUT).value.int_value = missing
    return cut


def _head(span: trace_pb2.Span) -> trace_pb2.Span:
    return trace_pb2.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name[:MAX_SPAN_ITEMS],
        kind=span.kind,
        start_time_unix_nano=span.start_time_unix_nano,
        end_time_unix_nano=span.end_time_unix_nano,
        status=trace_pb2.Status(code=span.status.code, message=span.status.message[: MAX_ATTRIBUTE_CHARS // 4]),
    )


def _fill(kept: Any, items: Iterable[Any], room: int) -> int:
    """Append the items that fit; return the room that is left."""
    for item in items:
        size = item.ByteSize()
        if size <= room:
            kept.append(item)
            room -= size
    return room


def _event(event: trace_pb2.Span.Event) -> trace_pb2.Span.Event:
    attributes = map(_attribute, event.attributes[:MAX_SPAN_ITEMS])
    return trace_pb2.Span.Event(
        name=event.name[:MAX_SPAN_ITEMS], time_unix_nano=event.time_unix_nano, attributes=attributes
    )


def _attribute(pair: common_pb2.KeyValue) -> common_pb2.KeyValue:
    return common_pb2.KeyValue(key=pair.key[:MAX_SPAN_ITEMS], value=_value(pair.value))


def _value(value: common_pb2.AnyValue) -> common_pb2.AnyValue:
    """Return a value with its texts cut; a nested map is left as it is, and goes as a whole when it does not fit."""
    match value.WhichOneof("value"):
        case "string_value":
            return common_pb2.AnyValue(string_value=value.string_value[:MAX_ATTRIBUTE_CHARS])
        case "bytes_value":
            return common_pb2.AnyValue(bytes_value=value.bytes_value[:MAX_ATTRIBUTE_CHARS])
        case "array_value":
            return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=_values(value.array_value.values)))
    return value


def _values(values: Any) -> Iterator[common_pb2.AnyValue]:
    return map(_value, values[:MAX_SPAN_ITEMS])


REQUEST_ID: Final = "quire.request_id"
TENANT: Final = "quire.tenant"
CORRELATION_ID: Final = "quire.correlation_id"
# Of a trace that is built from records: which ones are missing, and why. It may name an internal address.
UNREAD: Final = "quire.unread"
# Bytes in CPython of a kept span without its content, with its places in the store.
_SPAN_BYTES: Final = 1_000
# The same of a span of this process; of what it has.
_OWN_SPAN_BYTES: Final = 2_500
_ATTRIBUTE_BYTES, _TEXT_BYTES, _NUMBER_BYTES, _ITEM_BYTES, _EVENT_BYTES, _LINK_BYTES = 100, 60, 32, 8, 200, 500
_FLAT: Final = str | bytes | bytearray | memoryview | range
_MAX_SERVICE_CHARS: Final = 128
_STATUS = {trace_pb2.Status.STATUS_CODE_OK: "ok", trace_pb2.Status.STATUS_CODE_ERROR: "error"}


class KeptSpan(NamedTuple):
    """A span under its ids; `request_id` is "" where its attributes name no request. `size` is about its memory.

    `tenant` is whose request it is, `correlation_id` the client's name for it; only the router's own spans say that.
    """

    trace_id: str
    span_id: str
    request_id: str
    message: Callable[[], decision_pb2.Span]
    size: int = _SPAN_BYTES
    tenant: str = ""
    correlation_id: str = ""


def from_own(span: RecordedSpan) -> KeptSpan:
    """Return a span of this process, as the store keeps it."""
    context, named = span.context, span.attributes
    trace_id, span_id, read = f"{context.trace_id:032x}", f"{context.span_id:016x}", partial(_own_span, span)
    if not named:
        return KeptSpan(trace_id, span_id, "", read, own_bytes(span))
    request_id, tenant, correlation_id = (str(named.get(name, "")) for name in (REQUEST_ID, TENANT, CORRELATION_ID))
    return KeptSpan(trace_id, span_id, request_id, read, own_bytes(span), tenant, correlation_id)


def own_bytes(span: RecordedSpan) -> int:
    """Return about how much memory a span of this process takes, with the records of decisions in it."""
    size = _OWN_SPAN_BYTES
    if span.attributes:
        size += _attributes_bytes(span.attributes)
    for link in span.links:
        size += _LINK_BYTES + _attributes_bytes(link.attributes or {})
    for event in span.events:
        size += _event_bytes(event.attributes)
    return size


def _event_bytes(attributes: Mapping[str, object]) -> int:
    if isinstance(attributes, DecisionAttributes):
        return _EVENT_BYTES + record_bytes(attributes.decision)
    return _EVENT_BYTES + _attributes_bytes(attributes)


def _attributes_bytes(attributes: Mapping[str, object]) -> int:
    return _ATTRIBUTE_BYTES * len(attributes) + sum([_value_bytes(each) for each in attributes.values()])


def _value_bytes(value: object) -> int:
    """Return the memory of a value, and of all within it."""
    kind = type(value)
    if kind is str or kind is bytes:
        return _TEXT_BYTES + len(value)  # type: ignore[arg-type]
    if kind is float or kind is bool or value is None:
        return _NUMBER_BYTES
    if isinstance(value, int):
        return _NUMBER_BYTES + value.bit_length() // 8
    if isinstance(value, Mapping):
        return _TEXT_BYTES + _attributes_bytes(value)
    if isinstance(value, Collection) and not isinstance(value, _FLAT):
        return _TEXT_BYTES + sum([_ITEM_BYTES + _value_bytes(each) for each in value])
    return _TEXT_BYTES + (len(value) if isinstance(value, _FLAT) else 0)


def _own_span(span: RecordedSpan) -> decision_pb2.Span:
    return _stored_span(span.encoded(), span.origin.service)


def from_otlp(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[KeptSpan]:
    """Yield the spans of a request, each cut to a bounded size; one without proper ids is left out."""
    for resource_spans in request.resource_spans:
        service = _attributes(resource_spans.resource.attributes).get("service.name", "unknown")[:_MAX_SERVICE_CHARS]
        for scope_spans in resource_spans.scope_spans:
            yield from (_kept(bounded(span), service) for span in scope_spans.spans if has_ids(span))


def _kept(span: trace_pb2.Span, service: str) -> KeptSpan:
    named = next((each.value.string_value for each in span.attributes if each.key == REQUEST_ID), "")
    data = span.SerializeToString()
    ids = span.trace_id.hex(), span.span_id.hex(), named if is_id(named) else ""
    return KeptSpan(*ids, partial(_stored_span, data, service), _SPAN_BYTES + len(data))


def _stored_span(data: bytes, service: str) -> decision_pb2.Span:
    return _otlp_span(trace_pb2.Span.FromString(data), service)


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
