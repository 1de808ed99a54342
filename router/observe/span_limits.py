"""Cuts spans that other services send to a bounded size: long texts at their end, and items beyond what fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from common.contracts.limits import MAX_ATTRIBUTE_CHARS, MAX_SPAN_BYTES, MAX_SPAN_ITEMS

TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
# The attribute of a span that was cut; its value is the number of bytes that are missing.
CUT: Final = "quire.cut_bytes"
# Room for the fields of a span that are not items.
_HEAD_BYTES: Final = 16 << 10


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
