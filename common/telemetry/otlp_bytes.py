"""Spans as bytes of OTLP: the messages of OpenTelemetry's `trace.proto` and `common.proto`, written field by field.

A message object for each attribute takes longer than all other work on a span. Field numbers are those of the public
protocol, which do not change. Texts are cut at MAX_ATTRIBUTE_CHARS; of more than MAX_SPAN_ITEMS
attributes the first stay, of events and links the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from struct import Struct
from typing import Final, NamedTuple, Protocol

from opentelemetry.trace import Link, SpanContext, Status

from common.contracts.limits import MAX_ATTRIBUTE_CHARS, MAX_SPAN_ITEMS

# Every span says whether its parent is remote; the second bit says that it is.
_LOCAL_FLAGS, _REMOTE_FLAGS = 0x100, 0x300
_INT64: Final = 1 << 63
# trace_id = 1, span_id = 2 (bytes of 16 and 8); start and end = 7, 8 (fixed64); flags = 16 (fixed32).
_IDS: Final = Struct(">BBQQBBQ")
_PARENT: Final = Struct(">BBQ")
_TIMES: Final = Struct("<BQBQ")
_TIME: Final = Struct("<BQ")
_SPAN_FLAGS: Final = Struct("<BBI")
_LINK_FLAGS: Final = Struct("<BI")
_DOUBLE: Final = Struct("<Bd")
_SMALL: Final = tuple(bytes((number,)) for number in range(128))
_TRUE, _FALSE = b"\x10\x01", b"\x10\x00"


class SpanEvent(NamedTuple):
    """Something that happened within a span; `timestamp` in ns."""

    name: str
    timestamp: int
    attributes: Mapping[str, object]


class SpanLike(Protocol):
    """A span that has ended. Attributes are texts, numbers, truth values, bytes, or sequences of them."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_time: int
    end_time: int
    attributes: dict[str, object]
    status: Status
    dropped_events: int
    dropped_links: int

    @property
    def events(self) -> Sequence[SpanEvent]: ...

    @property
    def links(self) -> Sequence[Link]: ...

    @property
    def kind_number(self) -> int: ...


def span_bytes(span: SpanLike) -> bytes:
    """Return a span as a `Span` message."""
    context, parent = span.context, span.parent
    trace_id = context.trace_id
    parts = [_IDS.pack(0x0A, 16, trace_id >> 64, trace_id & 0xFFFF_FFFF_FFFF_FFFF, 0x12, 8, context.span_id)]
    _put_state(parts, context)
    if parent is not None:
        parts.append(_PARENT.pack(0x22, 8, parent.span_id))
    parts += (_named(0x2A, span.name), b"\x30", _SMALL[span.kind_number])
    parts.append(_TIMES.pack(0x39, span.start_time, 0x41, span.end_time))
    _put_dropped(parts, b"\x50", _put_attributes(parts, b"\x4a", span.attributes))
    parts += [_field(b"\x5a", _event(each)) for each in span.events]
    _put_dropped(parts, b"\x60", span.dropped_events)
    parts += [_field(b"\x6a", _link(each)) for each in span.links[-MAX_SPAN_ITEMS:]]
    _put_dropped(parts, b"\x70", span.dropped_links + max(0, len(span.links) - MAX_SPAN_ITEMS))
    parts.append(_field(b"\x7a", _status(span.status)))
    parts.append(_SPAN_FLAGS.pack(0x85, 0x01, _flags(parent)))
    return b"".join(parts)


def request_bytes(resources: Mapping[bytes, Sequence[bytes]], scope: str, schema_url: str) -> bytes:
    """Return an `ExportTraceServiceRequest`: `Span` messages by the `Resource` message of their process.

    `schema_url` names the conventions that the spans of the scope follow.
    """
    named, schema = _field(b"\x0a", _named(0x0A, scope)), _named(0x1A, schema_url)
    return b"".join(
        _field(b"\x0a", _field(b"\x0a", resource) + _field(b"\x12", named + b"".join(map(_span_field, spans)) + schema))
        for resource, spans in resources.items()
    )


def resource_bytes(attributes: Mapping[str, object]) -> bytes:
    """Return a `Resource` message."""
    parts: list[bytes] = []
    _put_attributes(parts, b"\x0a", attributes)
    return b"".join(parts)


def _span_field(span: bytes) -> bytes:
    return _field(b"\x12", span)


def _event(event: SpanEvent) -> bytes:
    parts = [_TIME.pack(0x09, event.timestamp), _named(0x12, event.name)]
    _put_dropped(parts, b"\x20", _put_attributes(parts, b"\x1a", event.attributes))
    return b"".join(parts)


def _link(link: Link) -> bytes:
    context, attributes = link.context, link.attributes or {}
    trace_id = context.trace_id
    parts = [_IDS.pack(0x0A, 16, trace_id >> 64, trace_id & 0xFFFF_FFFF_FFFF_FFFF, 0x12, 8, context.span_id)]
    _put_state(parts, context)
    _put_attributes(parts, b"\x22", attributes)
    parts.append(_LINK_FLAGS.pack(0x35, _flags(context)))
    return b"".join(parts)


def _status(status: Status) -> bytes:
    code = status.status_code.value
    message = _field(b"\x12", _text(status.description)) if status.description else b""
    return message + b"\x18" + _SMALL[code] if code else message


def _put_state(parts: list[bytes], context: SpanContext) -> None:
    """Append `trace_state`, field 3 of a span and of a link alike; few traces have one."""
    if context.trace_state:
        parts.append(_field(b"\x1a", context.trace_state.to_header().encode(errors="replace")))


def _flags(parent: SpanContext | None) -> int:
    return _REMOTE_FLAGS if parent is not None and parent.is_remote else _LOCAL_FLAGS


def _put_attributes(parts: list[bytes], tag: bytes, attributes: Mapping[str, object]) -> int:
    """Append `KeyValue` messages under the tag of their field; return how many more there are than may go."""
    items = attributes.items()
    for key, value in items if len(items) <= MAX_SPAN_ITEMS else islice(items, MAX_SPAN_ITEMS):
        encoded, head = _value(value), _key(key)
        size = len(encoded)
        within = head + b"\x12" + (_SMALL[size] if size < 128 else _varint(size)) + encoded
        size = len(within)
        parts.append(tag + (_SMALL[size] if size < 128 else _varint(size)) + within)
    return len(items) - MAX_SPAN_ITEMS


def _put_dropped(parts: list[bytes], tag: bytes, count: int) -> None:
    if count > 0:
        parts.append(tag + _varint(count))


def _value(value: object) -> bytes:
    """Return an `AnyValue` message; what the protocol has no type for goes as its text."""
    kind = type(value)
    if kind is str:
        return _field(b"\x0a", _text(value))  # type: ignore[arg-type]
    if kind is int:
        return _int(value)  # type: ignore[arg-type]
    if kind is float:
        return _DOUBLE.pack(0x21, value)
    if kind is bool:
        return _TRUE if value else _FALSE
    return _other_value(value)


def _other_value(value: object) -> bytes:
    """Return the message of a rare value: nothing, bytes, a sequence, or one of a derived class."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return _field(b"\x3a", value[:MAX_ATTRIBUTE_CHARS])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _field(b"\x2a", b"".join(_field(b"\x0a", _value(each)) for each in value[:MAX_SPAN_ITEMS]))
    if isinstance(value, int):
        return _int(int(value))
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    return _field(b"\x0a", _text(str(value)))


def _int(value: int) -> bytes:
    if 0 <= value < 128:
        return b"\x18" + _SMALL[value]
    if -_INT64 <= value < _INT64:
        return b"\x18" + _varint(value & (2 * _INT64 - 1))
    try:
        text = str(value)
    except ValueError:  # Python writes no more than 4300 decimal digits
        text = f"an integer of {value.bit_length()} bits"
    return _field(b"\x0a", _text(text))


def _text(value: str) -> bytes:
    """Return a text as UTF-8, cut to the length that the store takes; lone surrogates become question marks."""
    return value[:MAX_ATTRIBUTE_CHARS].encode(errors="replace")


@lru_cache(1024)
def _key(key: str) -> bytes:
    return _field(b"\x0a", _text(key))


@lru_cache(256)
def _named(tag: int, name: str) -> bytes:
    """Return a name under its tag; names are few."""
    return _field(bytes((tag,)), _text(name))


def _field(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    return tag + (_SMALL[size] if size < 128 else _varint(size)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
