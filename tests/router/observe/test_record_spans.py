"""Spans from decision records: places and lengths by the record of the end, decisions where they belong."""

from __future__ import annotations

from common.contracts.types import Decision, DecisionKind
from router.observe.diagnosis.outcome import Outcome
from router.observe.record_spans import EndedRequest, RecordSpan, spans_of

S = 1_000_000_000


def decision(kind: DecisionKind, at: float, request_id: str = "r1", **fields: str) -> Decision:
    return Decision(f"{kind}-{at}-{request_id}", kind, round(at * S), fields.pop("chosen", ""), request_id, **fields)  # type: ignore[arg-type]


def ended(outcome: Outcome | None, *decisions: Decision, seconds: float = 10.0, failure: str = "") -> EndedRequest:
    return EndedRequest("r1", 0, round(seconds * S), outcome, failure, decisions)


def lines(spans: list[RecordSpan]) -> list[tuple[str, str, float, float, str]]:
    """Return name, service, start and end in seconds, and the name of the parent of each span."""
    names = [span.name for span in spans]
    return [
        (each.name, each.service, each.start_ns / S, each.end_ns / S, "" if each.parent is None else names[each.parent])
        for each in spans
    ]


def kinds(spans: list[RecordSpan]) -> dict[str, list[str]]:
    return {span.name: [each.kind.value for each in span.decisions] for span in spans if span.decisions}


def test_what_held_a_request_up_at_its_worker_has_spans_of_its_own() -> None:
    outcome = Outcome(
        before=(("constraint", 1.0), ("blocks", 1.0), ("manager_away", 2.0), ("prefill", 1.0), ("stalled", 1.0)),
        after=(("stalled", 1.0), ("decode", 3.0)),
        has_first_token=True,
    )
    assert lines(spans_of(ended(outcome))) == [
        ("request", "router", 0.0, 10.0, ""),
        ("constraint", "gpuworker", 0.0, 1.0, "request"),
        ("reserve", "kvmanager", 1.0, 2.0, "request"),
        ("without manager", "gpuworker", 2.0, 4.0, "request"),
        ("prefill", "gpuworker", 4.0, 5.0, "request"),
        ("lacking blocks", "gpuworker", 5.0, 6.0, "request"),
        ("decode", "gpuworker", 6.0, 10.0, "request"),
    ]


def test_the_wait_for_a_fetch_is_a_span_between_that_for_blocks_and_the_prefill() -> None:
    outcome = Outcome(
        before=(("blocks", 1.0), ("fetch", 2.0), ("loading", 0.5), ("prefill", 1.0)), has_first_token=True
    )
    assert lines(spans_of(ended(outcome)))[1:5] == [
        ("reserve", "kvmanager", 0.0, 1.0, "request"),
        ("fetch", "gpuworker", 1.0, 3.0, "request"),
        ("load", "gpuworker", 3.0, 3.5, "request"),
        ("prefill", "gpuworker", 3.5, 4.5, "request"),
    ]


def test_phases_follow_one_another_and_decisions_stand_in_them() -> None:
    outcome = Outcome(
        before=(("queue", 1.0), ("lookup", 0.5), ("blocks", 2.0), ("prefill_wait", 0.5), ("prefill", 1.0)),
        after=(("decode", 4.0), ("client", 1.0)),
        has_first_token=True,
    )
    spans = spans_of(
        ended(
            outcome,
            decision(DecisionKind.GRANT, 3.5),
            decision(DecisionKind.ADMISSION, 0.0),
            decision(DecisionKind.ROUTING, 1.5),
            decision(DecisionKind.SHORTFALL, 1.6),
            decision(DecisionKind.OUTCOME, 10.0),
        )
    )
    assert lines(spans) == [
        ("request", "router", 0.0, 10.0, ""),
        ("queue", "router", 0.0, 1.5, "request"),
        ("lookup", "router", 1.0, 1.5, "queue"),
        ("reserve", "kvmanager", 1.5, 3.5, "request"),
        ("prefill wait", "gpuworker", 3.5, 4.0, "request"),
        ("prefill", "gpuworker", 4.0, 5.0, "request"),
        ("decode", "gpuworker", 5.0, 9.0, "request"),
        ("client", "router", 9.0, 10.0, "request"),
    ]
    assert kinds(spans) == {"queue": ["admission", "routing"], "reserve": ["shortfall", "grant"]}


def test_what_was_late_around_the_work_has_spans_of_its_own() -> None:
    outcome = Outcome(
        before=(("reading", 0.5), ("router_still", 1.0), ("on_the_way", 0.5), ("worker_still", 1.0), ("prefill", 1.0)),
        after=(("decode", 2.0), ("router_still", 1.0), ("on_the_way", 1.0), ("sending", 0.5), ("client", 1.5)),
        has_first_token=True,
    )
    assert lines(spans_of(ended(outcome)))[1:] == [
        ("reading", "router", 0.0, 0.5, "request"),
        ("router still", "router", 0.5, 1.5, "request"),
        ("on the way", "router", 1.5, 2.0, "request"),
        ("worker still", "gpuworker", 2.0, 3.0, "request"),
        ("prefill", "gpuworker", 3.0, 4.0, "request"),
        ("decode", "gpuworker", 4.0, 6.0, "request"),
        ("router still", "router", 6.0, 7.0, "request"),
        ("on the way", "router", 7.0, 8.0, "request"),
        ("sending", "router", 8.0, 8.5, "request"),
        ("client", "router", 8.5, 10.0, "request"),
    ]


def test_an_interruption_begins_with_its_record() -> None:
    outcome = Outcome(
        before=(("prefill", 1.0),), after=(("decode", 5.0), ("preempted", 3.0), ("moved", 1.0)), has_first_token=True
    )
    spans = spans_of(
        ended(
            outcome,
            decision(DecisionKind.PREEMPTION, 0.2, "other", victim="other", beneficiary="r1"),
            decision(DecisionKind.PREEMPTION, 2.0, "r1", victim="r1", beneficiary="other"),
            decision(DecisionKind.MIGRATION, 7.0),
        )
    )
    assert [each for each in lines(spans) if each[0] in ("preempted", "moved", "decode")] == [
        ("decode", "gpuworker", 1.0, 10.0, "request"),
        ("preempted", "kvmanager", 2.0, 5.0, "request"),
        ("moved", "router", 7.0, 8.0, "request"),
    ]
    assert kinds(spans) == {"request": ["preemption", "preemption"], "moved": ["migration"]}


def test_a_lost_record_hides_no_interruption() -> None:
    outcome = Outcome(before=(("prefill", 1.0),), after=(("decode", 5.0), ("preempted", 4.0)), has_first_token=True)
    assert ("preempted", "kvmanager", 6.0, 10.0, "request") in lines(spans_of(ended(outcome)))


def test_a_request_without_a_first_token_ends_in_the_phase_that_it_was_in() -> None:
    spans = spans_of(ended(Outcome(before=(("queue", 4.0), ("blocks", 6.0))), failure="deadline exceeded"))
    assert lines(spans)[1:] == [
        ("queue", "router", 0.0, 4.0, "request"),
        ("reserve", "kvmanager", 4.0, 10.0, "request"),
    ]
    assert [span.failure for span in spans] == ["deadline exceeded", "", ""]


def test_a_refused_request_is_one_span_with_the_refusal() -> None:
    spans = spans_of(ended(None, decision(DecisionKind.REJECTION, 0.0), seconds=0.001, failure="1 requests wait"))
    assert lines(spans) == [("request", "router", 0.0, 0.001, "")]
    assert kinds(spans) == {"request": ["rejection"]}


def test_records_about_other_requests_and_repeated_ones_are_left_out() -> None:
    grant = decision(DecisionKind.GRANT, 1.0)
    other = decision(DecisionKind.GRANT, 2.0, "r2", beneficiary="r1")
    assert kinds(spans_of(ended(Outcome(before=(("blocks", 2.0),)), grant, grant, other))) == {"reserve": ["grant"]}
