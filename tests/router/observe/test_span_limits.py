"""Spans of other services are cut to a bounded size, and keep what fits."""

from __future__ import annotations

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from common.contracts.limits import MAX_ATTRIBUTE_CHARS, MAX_SPAN_BYTES, MAX_SPAN_ITEMS
from router.observe.trace_codec import CUT, bounded, from_otlp, has_ids


def span(**fields: object) -> trace_pb2.Span:
    return trace_pb2.Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="sequence", **fields)  # type: ignore[arg-type]


def test_a_small_span_stays_as_it_is() -> None:
    made = span(start_time_unix_nano=5)
    made.attributes.add(key="quire.request_id").value.string_value = "r1"
    assert bounded(made) is made


def test_a_long_text_is_cut_and_the_rest_stays() -> None:
    made = span(start_time_unix_nano=5, parent_span_id=b"p" * 8)
    made.attributes.add(key="long").value.string_value = "x" * (1 << 20)
    made.attributes.add(key="short").value.int_value = 7
    made.events.add(name="decision", time_unix_nano=6)
    cut = bounded(made)
    values = {pair.key: pair.value for pair in cut.attributes}
    assert len(values["long"].string_value) == MAX_ATTRIBUTE_CHARS
    assert values["short"].int_value == 7
    assert [event.name for event in cut.events] == ["decision"]
    assert (cut.start_time_unix_nano, cut.parent_span_id) == (5, b"p" * 8)
    assert 0 <= made.ByteSize() - cut.ByteSize() - values[CUT].int_value + 32 <= 32


def test_no_span_is_larger_than_the_bound() -> None:
    made = span()
    for number in range(1_000):
        made.attributes.add(key=f"key {number}").value.string_value = "x" * 2_000
        event = made.events.add(name="e" * 2_000)
        for value in event.attributes.add(key="values").value.array_value.values.add(), event.attributes.add().value:
            value.bytes_value = b"y" * 2_000
        made.links.add(trace_id=b"l" * 2_000)
    nested = made.attributes.add(key="nested").value
    for _ in range(50):
        nested = nested.kvlist_value.values.add(key="k" * 2_000).value
    cut = bounded(made)
    assert 0 < cut.ByteSize() <= MAX_SPAN_BYTES
    assert 0 < len(cut.attributes) <= MAX_SPAN_ITEMS + 1
    assert cut.attributes[-1].key == CUT


def test_a_span_without_proper_ids_is_left_out() -> None:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    good = [span(), span(parent_span_id=b"p" * 8)]
    bad = [span(parent_span_id=b"p" * 9), trace_pb2.Span(trace_id=b"t" * 17, span_id=b"s" * 8), trace_pb2.Span()]
    spans.extend([*bad, *good])
    assert list(map(has_ids, spans)) == [False, False, False, True, True]
    assert len(list(from_otlp(request))) == 2
