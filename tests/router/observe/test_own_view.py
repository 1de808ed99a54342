"""What a client sees of its request: its spans, and no name of another request."""

from __future__ import annotations

import json

import pytest

from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.observe.own_view import ANOTHER, own_decision, own_explanation, own_spans
from router.observe.trace_codec import UNREAD

TRACE = "0af7651916cd43dd8448eb211c80319c"
FULL = "no worker has a free slot"
AHEAD = "another request waits for a worker and goes first"
LATE = "0.100 s are left, and the first token is predicted in 0.500 s"


def span(span_id: str, parent: str, name: str, request_id: str = "") -> pb.Span:
    attributes = {"quire.request_id": request_id} if request_id else {}
    return pb.Span(span_id=span_id, parent_span_id=parent, name=name, attributes=attributes)


def shared() -> pb.GetTraceResponse:
    """A trace in which two requests have spans, under the span of a client that both name."""
    spans = [
        span("a1", "client", "rpc"),
        span("a2", "a1", "request", "a"),
        span("a3", "a2", "sequence", "a"),
        span("a4", "a3", "decode"),
        span("b2", "client", "request", "b"),
        span("b3", "b2", "decode"),
    ]
    return pb.GetTraceResponse(trace_id=TRACE, spans=spans)


def test_a_view_has_the_spans_of_one_request() -> None:
    assert [each.span_id for each in own_spans(shared(), "a").spans] == ["a2", "a3", "a4"]
    assert [each.span_id for each in own_spans(shared(), "b").spans] == ["b2", "b3"]
    assert not own_spans(shared(), "c").spans


def test_a_view_of_a_tenant_has_no_request_of_another_with_the_same_id() -> None:
    found = shared()
    found.spans[1].attributes["quire.tenant"] = "red"
    found.spans[4].attributes.update({"quire.tenant": "blue", "quire.request_id": "a"})
    assert [each.span_id for each in own_spans(found, "a", "red").spans] == ["a2", "a3", "a4"]
    assert [each.span_id for each in own_spans(found, "a", "blue").spans] == ["b2", "b3"]
    assert not own_spans(found, "a", "green").spans


def test_links_to_other_requests_are_left_out() -> None:
    found = shared()
    found.spans[3].links.extend([f"{TRACE}:a2", f"{TRACE}:b2", "ff:a2"])
    assert list(own_spans(found, "a").spans[2].links) == [f"{TRACE}:a2"]


def test_a_preemption_names_no_other_request() -> None:
    found = shared()
    decision = {"kind": "preemption", "chosen": "b", "victim": "b", "beneficiary": "a", "id": "m-1"}
    attributes = {f"quire.decision.{key}": value for key, value in decision.items()}
    attributes["quire.decision.candidates"] = json.dumps(['{"name": "b"}'])
    found.spans[2].events.add(name="decision", attributes=attributes)
    (event,) = own_spans(found, "a").spans[1].events
    assert event.attributes == {
        "quire.decision.id": "m-1",
        "quire.decision.kind": "preemption",
        "quire.decision.chosen": ANOTHER,
        "quire.decision.victim": ANOTHER,
        "quire.decision.beneficiary": "a",
    }


def test_a_built_trace_names_no_internal_address() -> None:
    found = shared()
    found.spans[1].attributes[UNREAD] = "the KV manager: no KV manager answers at 10.0.0.7:50052"
    assert own_spans(found, "a").spans[0].attributes == {"quire.request_id": "a"}


def test_a_short_fall_names_no_request_that_holds_blocks() -> None:
    found = shared()
    decision = {"kind": "shortfall", "chosen": "waits", "beneficiary": "b", "id": "m-1"}
    attributes = {f"quire.decision.{key}": value for key, value in decision.items()}
    attributes["quire.decision.candidates"] = json.dumps(['{"name": "b"}', '{"name": "tenant blue"}'])
    found.spans[2].events.add(name="decision", attributes=attributes)
    (event,) = own_spans(found, "a").spans[1].events
    assert event.attributes == {
        "quire.decision.id": "m-1",
        "quire.decision.kind": "shortfall",
        "quire.decision.chosen": "waits",
        "quire.decision.beneficiary": ANOTHER,
    }


def test_a_record_of_a_preemption_names_no_other_request() -> None:
    record = pb.DecisionRecord(
        decision_id="m-1", kind="preemption", request_id="b", chosen="b", victim="b", beneficiary="a",
        candidates=[pb.Candidate(name="b"), pb.Candidate(name="c")], figures={"blocks": 3},
    )  # fmt: skip
    own = own_decision(record, "a")
    assert (own.request_id, own.chosen, own.victim, own.beneficiary) == (ANOTHER, ANOTHER, ANOTHER, "a")
    assert not own.candidates
    assert own.figures == {"blocks": 3}


def test_a_routing_record_stays_as_it_is() -> None:
    record = pb.DecisionRecord(kind="routing", request_id="a", chosen="w0", candidates=[pb.Candidate(name="w0")])
    assert own_decision(record, "a") == record


def test_a_wait_for_blocks_names_no_request_and_no_tenant_that_holds_them() -> None:
    record = pb.DecisionRecord(
        kind="shortfall", request_id="a", chosen="waits", beneficiary="b", reasons=["behind another sequence"],
        candidates=[pb.Candidate(name="tenant blue"), pb.Candidate(name="b")],
    )  # fmt: skip
    own = own_decision(record, "a")
    assert (own.beneficiary, list(own.reasons)) == (ANOTHER, ["behind another sequence"])
    assert not own.candidates


def test_an_outcome_says_nothing_of_what_others_sent_or_computed() -> None:
    outcome = Outcome(
        ended="length", miss="never_seen", other_domain="of tenant blue", other_domain_tokens=64, ahead_of="b",
        prompt_tokens=70, block_size=16,
    )  # fmt: skip
    record = pb.DecisionRecord(
        kind="outcome", request_id="a", chosen="length", reasons=texts_of(outcome), figures=dict(figures_of(outcome))
    )
    own = own_decision(record, "a")
    assert list(own.reasons) == ["ended: length", "miss: never_seen"]
    assert dict(own.figures) == {"prompt_tokens": 70, "block_size": 16, "index_answered": 1}


def test_an_explanation_says_nothing_of_what_others_do() -> None:
    busy = pb.Candidate(
        name="w0", cost=2.0, terms={"queue_delay": 1.9}, figures={"hit_blocks": 3.0, "queue_delay": 1.9, "unheld": 4.0}
    )
    whole = pb.ExplainResponse(
        outcome="placed",
        worker_id="w0",
        workers=[busy, pb.Candidate(name="w1", rejected="over limit: 24 sequences of at most 24")],
        signal_ages={"heartbeat": 0.1},
        cached_tokens=48,
        first_token_seconds=0.5,
        requests_before=7,
    )
    own = own_explanation(whole)
    assert own == pb.ExplainResponse(
        outcome="placed",
        worker_id="w0",
        workers=[
            pb.Candidate(name="w0", figures={"hit_blocks": 3.0}),
            pb.Candidate(name="w1", rejected="over limit"),
        ],
        cached_tokens=48,
        first_token_seconds=0.5,
    )


@pytest.mark.parametrize(
    ("outcome", "whole", "own"),
    [
        ("placed", "", ""),
        ("queued", f"{FULL}: w0: over limit: 24 sequences of at most 24", FULL),
        ("queued", AHEAD, AHEAD),
        ("refused", "router.queue: 512 requests wait; at most 512", "router.queue"),
        ("refused", "tenant ana.sequences: 3 of at most 2", "tenant ana.sequences"),
        ("too_large", "prompt and output fit no worker: w0: too large: 9 blocks", "prompt and output fit no worker"),
        ("no_worker", "w0: hung: no heartbeat for 6.0 s; w1: draining", "no worker takes requests"),
        ("too_late", LATE, LATE),
    ],
)  # fmt: skip
def test_the_reason_of_an_explanation_is_without_the_load_of_others(outcome: str, whole: str, own: str) -> None:
    assert own_explanation(pb.ExplainResponse(outcome=outcome, reason=whole)).reason == own
