"""Spans against OpenTelemetry's own: the same calls leave the same message of OTLP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from common.contracts.gen_ai_names import SCHEMA_URL
from common.contracts.limits import MAX_ATTRIBUTE_CHARS, MAX_SPAN_ITEMS
from common.contracts.types import FinishReason
from common.telemetry import context_from
from common.telemetry.delivery import otlp_request
from common.telemetry.spans import SCOPE, Origin, RecordedSpan, SpanTracer
from tests.support.spans import CollectedSpans, tracer_to

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RESOURCE = {"service.name": "quire-test", "service.instance.id": "7"}
Value = Any

bare = (
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(TraceFlags.SAMPLED)),
)
# OpenTelemetry's exporter leaves out the state of links.
contexts = st.builds(SpanContext, *bare)
states = st.builds(
    TraceState,
    st.dictionaries(st.sampled_from(("a", "b@c")), st.sampled_from("xy")).map(lambda pairs: [*pairs.items()]),
)
parents = st.builds(SpanContext, *bare, states)
texts = st.text(max_size=200)
singles = st.one_of(
    texts,
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.binary(max_size=20),
)
lists = st.one_of(*(st.lists(each, max_size=4) for each in (texts, st.integers(-5, 300), st.floats(allow_nan=False))))
attributes = st.dictionaries(st.text(min_size=1, max_size=200), singles | lists, max_size=6)
times = st.integers(0, 2**64 - 1)
calls: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("set_attributes"), st.tuples(attributes)),
    st.tuples(st.just("set_attribute"), st.tuples(st.sampled_from("ab"), singles)),
    st.tuples(st.just("add_event"), st.tuples(texts, attributes, times)),
    st.tuples(st.just("set_status"), st.tuples(st.sampled_from(StatusCode))),
    st.tuples(st.just("set_status"), st.tuples(st.just(StatusCode.ERROR), texts)),
    st.tuples(st.just("update_name"), st.tuples(texts)),
    st.tuples(st.just("end"), st.tuples(times)),
)


class Numbered(IdGenerator):
    """Gives both tracers the same ids."""

    def __init__(self) -> None:
        self._last = 0

    def generate_span_id(self) -> int:
        self._last += 1
        return self._last

    def generate_trace_id(self) -> int:
        return 77


def theirs(use: Callable[[Tracer], object]) -> ExportTraceServiceRequest:
    """Return what OpenTelemetry makes of the spans that a function ends."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(ALWAYS_ON, Resource(RESOURCE), shutdown_on_exit=False, id_generator=Numbered())
    provider.add_span_processor(SimpleSpanProcessor(memory))
    use(provider.get_tracer(SCOPE, schema_url=SCHEMA_URL))
    return encode_spans(memory.get_finished_spans())


def ours(use: Callable[[Tracer], object]) -> ExportTraceServiceRequest:
    ended: list[RecordedSpan] = []
    use(SpanTracer(Origin(Resource(RESOURCE)), ALWAYS_ON, Numbered(), ended.append))
    return otlp_request(ended)


def in_order(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    """Sort the attributes of spans: their order says nothing, and a value that is set again moves in one of the two."""
    for span in request.resource_spans[0].scope_spans[0].spans:
        span.attributes.sort(key=attrgetter("key"))
    return request


@given(
    parent=st.none() | parents,
    kind=st.sampled_from(SpanKind),
    links=st.lists(st.builds(Link, contexts, attributes), max_size=3),
    first=attributes,
    done=st.lists(calls, max_size=8),
    failure=texts,
)
def test_the_same_calls_leave_the_same_message(
    parent: SpanContext | None,
    kind: SpanKind,
    links: list[Link],
    first: dict[str, Value],
    done: list[tuple[str, tuple[Any, ...]]],
    failure: str,
) -> None:
    def use(tracer: Tracer) -> None:
        context = Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
        root = tracer.start_span("root", context, kind, first, links, 5)
        child = tracer.start_span("child", set_span_in_context(root), start_time=6)
        for name, arguments in done:
            getattr(child, name)(*arguments)
        child.set_status(StatusCode.ERROR, failure)
        child.end(7)
        root.end(8)

    assert in_order(ours(use)) == in_order(theirs(use))


@pytest.mark.parametrize("escapes", [False, True])
def test_an_exception_in_the_current_span_is_told_as_by_opentelemetry(escapes: bool) -> None:
    def use(tracer: Tracer) -> None:
        with suppress(ZeroDivisionError), tracer.start_as_current_span("work", start_time=5) as span:
            try:
                raise ZeroDivisionError("why")
            except ZeroDivisionError as error:
                span.record_exception(error, {"more": 1}, 6)
                if escapes:
                    raise

    found = [each.resource_spans[0].scope_spans[0].spans[0] for each in (ours(use), theirs(use))]
    for span in found:
        span.end_time_unix_nano = 0
        for event in span.events[1:]:
            event.time_unix_nano = 0
        for event in span.events:
            for pair in event.attributes:
                pair.value.string_value = pair.value.string_value.partition("  File")[0]
    assert len(found[0].events) == 1 + escapes
    assert found[0] == found[1]


def test_below_a_recorded_span_the_sampler_is_not_asked_again() -> None:
    asked: list[str] = []

    class Counting(Sampler):
        def should_sample(self, parent_context: Any, trace_id: int, name: str, *rest: Any, **_: Any) -> SamplingResult:
            asked.append(name)
            return SamplingResult(Decision.RECORD_AND_SAMPLE)

        def get_description(self) -> str:
            return "Counting"

    tracer = CollectedSpans(Counting()).tracer
    root = tracer.start_span("root", context_from(REMOTE))
    child = tracer.start_span("child", set_span_in_context(root))
    assert asked == ["root"]
    assert child.get_span_context().trace_id == root.get_span_context().trace_id


def test_the_state_of_a_trace_goes_with_its_spans_and_links() -> None:
    collected = CollectedSpans()
    state = TraceState([("vendor", "1"), ("other@b", "x")])
    remote = SpanContext(1, 2, True, TraceFlags(TraceFlags.SAMPLED), state)
    root = collected.tracer.start_span("root", set_span_in_context(NonRecordingSpan(remote), Context()))
    child = collected.tracer.start_span("child", set_span_in_context(root), links=[Link(remote)])
    root.add_link(SpanContext(3, 4, is_remote=False))
    child.end()
    root.end()
    assert message(root).trace_state == message(child).trace_state == "vendor=1,other@b=x"
    assert message(child).links[0].trace_state == "vendor=1,other@b=x"
    assert message(root).links[0].trace_state == ""


def test_what_is_not_sampled_keeps_its_trace_and_is_not_handed_over() -> None:
    collected = CollectedSpans(ALWAYS_OFF)
    span = collected.tracer.start_span("root", context_from(REMOTE))
    below = collected.tracer.start_span("below", set_span_in_context(span))
    for each in (below, span):
        assert not each.is_recording()
        assert not each.get_span_context().trace_flags.sampled
        assert f"{each.get_span_context().trace_id:032x}" == REMOTE.split("-")[1]
        each.end()
    assert collected.ended() == ()


def test_after_its_end_a_span_changes_no_more() -> None:
    collected = CollectedSpans()
    span = collected.tracer.start_span("once", attributes={"a": 1})
    span.end(9)
    before = collected.named("once").encoded()
    span.set_attribute("a", 2)
    span.set_attributes({"b": 2})
    span.add_event("late")
    span.update_name("other")
    span.set_status(StatusCode.ERROR, "late")
    span.end(10)
    assert collected.named("once").encoded() == before


def message(span: Span) -> trace_pb2.Span:
    """Return a span of ours as a collector reads it."""
    assert isinstance(span, RecordedSpan)
    return trace_pb2.Span.FromString(span.encoded())


def test_a_span_is_bounded_and_says_what_is_missing() -> None:
    tracer, more = CollectedSpans().tracer, MAX_SPAN_ITEMS + 2
    many = {str(number): number for number in range(more)}
    links = [Link(SpanContext(1, 1 + number, is_remote=False)) for number in range(more)]
    span = tracer.start_span("full", attributes=many, links=links)
    span.set_attribute("0", "x" * (MAX_ATTRIBUTE_CHARS + 1))
    span.add_link(SpanContext(1, more + 1, is_remote=False))
    for number in range(more):
        span.add_event(str(number), many)
    span.end()
    found = message(span)
    assert (len(found.attributes), found.dropped_attributes_count) == (MAX_SPAN_ITEMS, 2)
    assert found.attributes[0].value.string_value == "x" * MAX_ATTRIBUTE_CHARS
    assert (len(found.links), found.dropped_links_count) == (MAX_SPAN_ITEMS, 3)
    # As with events, the oldest go.
    assert [int.from_bytes(each.span_id) for each in found.links][:: MAX_SPAN_ITEMS - 1] == [4, more + 1]
    assert ([each.name for each in found.events][:2], len(found.events)) == (["2", "3"], MAX_SPAN_ITEMS)
    assert found.dropped_events_count == 2
    assert {(len(each.attributes), each.dropped_attributes_count) for each in found.events} == {(MAX_SPAN_ITEMS, 2)}


def test_a_value_that_the_protocol_cannot_hold_goes_as_text_and_its_span_stays() -> None:
    span = CollectedSpans().tracer.start_span("odd")
    odd: dict[str, Any] = {
        "huge": 2**64,
        "vast": 10**5000,
        "lone": "a\ud800b",
        "none": None,
        "kind": SpanKind.SERVER,
        "reason": FinishReason.STOP,
    }
    span.set_attributes(odd)
    span.set_attribute("many", ["a", 2**70])
    span.end()
    found = {each.key: each.value for each in message(span).attributes}
    assert found["huge"].string_value == str(2**64)
    assert found["vast"].string_value == f"an integer of {(10**5000).bit_length()} bits"
    assert found["none"].WhichOneof("value") is None
    assert found["lone"].string_value == "a?b"
    assert found["kind"].string_value == "SpanKind.SERVER"
    assert found["reason"].string_value == "stop"
    assert [each.string_value for each in found["many"].array_value.values] == ["a", str(2**70)]


def test_a_span_that_cannot_be_written_is_left_out_of_its_request() -> None:
    ended: list[RecordedSpan] = []
    tracer = tracer_to(ended.append, "quire-router")
    for start in (1, -1, 2, 2**64):
        tracer.start_span("span", start_time=start).end(5)
    found = otlp_request(ended).resource_spans[0].scope_spans[0].spans
    assert [each.start_time_unix_nano for each in found] == [1, 2]


def test_spans_of_several_services_go_in_one_request() -> None:
    ended: list[RecordedSpan] = []
    for service in ("quire-router", "quire-kvmanager", "quire-router"):
        tracer_to(ended.append, service).start_span(service).end()
    found = otlp_request(ended)
    names = {
        each.resource.attributes[0].value.string_value: [span.name for span in each.scope_spans[0].spans]
        for each in found.resource_spans
    }
    assert names == {"quire-router": ["quire-router"] * 2, "quire-kvmanager": ["quire-kvmanager"]}
