"""A decision record as a span event."""

from __future__ import annotations

import json

from opentelemetry.proto.trace.v1 import trace_pb2

from common.contracts.types import Candidate, Decision, DecisionKind
from common.telemetry.decisions import add_decision
from tests.support.spans import CollectedSpans

DECISION = Decision(
    decision_id="d-1",
    kind=DecisionKind.ROUTING,
    time_ns=42,
    chosen="w0",
    candidates=(
        Candidate("w0", cost=0.5, terms=(("queue_delay", 0.2), ("prefill_time", 0.3)), figures=(("hit_blocks", 4.0),)),
        Candidate("w1", rejected="draining"),
    ),
    signal_ages=(("w0", 0.1),),
    figures=(("prompt_tokens", 70.0),),
)


def test_the_event_has_every_part_that_is_set() -> None:
    collected = CollectedSpans()
    with collected.tracer.start_as_current_span("route") as span:
        add_decision(span, DECISION)
    (event,) = collected.named("route").events
    attributes = dict(event.attributes)
    candidates = attributes.pop("quire.decision.candidates")
    assert (event.name, event.timestamp) == ("decision", 42)
    assert attributes == {
        "quire.decision.id": "d-1",
        "quire.decision.kind": "routing",
        "quire.decision.chosen": "w0",
        "quire.decision.age.w0": 0.1,
        "quire.decision.prompt_tokens": 70.0,
    }
    assert isinstance(candidates, list)
    assert [json.loads(str(each)) for each in candidates] == [
        {"name": "w0", "cost": 0.5, "queue_delay": 0.2, "prefill_time": 0.3, "figures": {"hit_blocks": 4.0}},
        {"name": "w1", "rejected": "draining"},
    ]


def test_the_message_of_a_span_has_the_attributes_of_its_decisions() -> None:
    collected = CollectedSpans()
    with collected.tracer.start_as_current_span("route") as span:
        add_decision(span, DECISION)
    made = collected.named("route")
    (event,) = trace_pb2.Span.FromString(made.encoded()).events
    (kept,) = made.events
    assert [pair.key for pair in event.attributes] == list(kept.attributes)
    assert len(event.attributes) == len(kept.attributes) == 6
    assert event.attributes[1].value.string_value == kept.attributes["quire.decision.kind"] == "routing"
