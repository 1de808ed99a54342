"""An API chooses the id of the trace that a request begins."""

from __future__ import annotations

import secrets

from opentelemetry.trace import Span, set_span_in_context

from router.observe.sampling import ChosenTraceIds, beginning
from tests.support.spans import tracer_to


def trace_id(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"


def test_a_trace_has_the_id_that_was_chosen_for_it_and_others_have_ids_of_their_own() -> None:
    tracer = tracer_to(lambda _: None, ids=ChosenTraceIds())
    chosen = secrets.token_hex(16)
    before = tracer.start_span("before")
    with beginning(chosen):
        begun = tracer.start_span("begun")
        below = tracer.start_span("below", set_span_in_context(before))
    with beginning(""):
        unchosen = tracer.start_span("unchosen")
    assert trace_id(begun) == chosen
    assert trace_id(below) == trace_id(before)
    assert len({*map(trace_id, (before, begun, unchosen, tracer.start_span("after")))}) == 4
