"""Trace context as text: what goes into messages and comes out of them."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from common.telemetry import context_from, is_sampled, parent_of, span_context_of, traceparent_of
from tests.support.spans import CollectedSpans

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-1] + "0"


def test_without_a_span_there_is_no_traceparent() -> None:
    assert traceparent_of() == ""


def test_a_context_made_from_text_gives_the_text_back() -> None:
    assert traceparent_of(context_from(SAMPLED)) == SAMPLED


def test_a_span_that_is_not_sampled_says_so_to_those_further_along() -> None:
    span = CollectedSpans(ALWAYS_OFF).tracer.start_span("off", context_from(UNSAMPLED))
    text = traceparent_of(trace.set_span_in_context(span))
    assert text.startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert not is_sampled(text)


def test_a_child_keeps_the_trace_and_names_its_parent() -> None:
    child = CollectedSpans(ALWAYS_ON).tracer.start_span("child", context_from(SAMPLED))
    assert f"{child.get_span_context().trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert is_sampled(traceparent_of(trace.set_span_in_context(child)))


@pytest.mark.parametrize("text", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", SAMPLED[:-3]])
def test_text_that_is_no_traceparent_starts_a_trace_of_its_own(text: str) -> None:
    assert not span_context_of(text).is_valid
    assert traceparent_of(context_from(text)) == ""


@pytest.mark.parametrize(("text", "sampled"), [(SAMPLED, True), (UNSAMPLED, False), ("", False)])
def test_sampled_is_the_last_bit(text: str, sampled: bool) -> None:
    assert is_sampled(text) is sampled


def test_a_link_points_to_the_span_in_the_text() -> None:
    assert f"{span_context_of(SAMPLED).span_id:016x}" == "b7ad6b7169203331"


def test_the_trace_state_is_kept_and_passed_on_to_the_spans_below() -> None:
    spans, state = CollectedSpans(), "vendor=a:1,other=b"
    with spans.tracer.start_as_current_span("request", context=parent_of(SAMPLED, state)):
        spans.tracer.start_span("below").end()
    assert [span.name for span in spans.ended()] == ["below", "request"]
    assert all(state.encode() in span.encoded() for span in spans.ended())


@pytest.mark.parametrize("state", ["", "no pair", "x=" + "y" * 600])
def test_a_trace_state_that_nobody_can_pass_on_leaves_the_trace_as_it_is(state: str) -> None:
    context = trace.get_current_span(context_from(SAMPLED, state)).get_span_context()
    assert (context.is_valid, context.trace_state.to_header()) == (True, "")
    assert not trace.get_current_span(context_from("", "a=1")).get_span_context().is_valid
