"""The ring of decision records, and records on the wire."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from common.contracts.limits import MAX_DECISION_LINES, MAX_LISTED_DECISIONS
from common.contracts.types import Candidate, Decision, DecisionKind
from common.decisions import log_line
from common.decisions.ring import DecisionRing, record_bytes
from common.process.logs import JsonFormatter, fields_of, trace_ids
from common.untrusted.rare_lines import RareLines
from common.wire.decision_codec import decision_to_proto, trace_id_of
from quire.decision.v1 import decision_pb2

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def decision(number: int, request: str = "", kind: DecisionKind = DecisionKind.ROUTING, **more: str) -> Decision:
    return Decision(f"d{number}", kind, number, "worker-0", request_id=request, **more)  # type: ignore[arg-type]


def ids(found: list[Decision]) -> list[str]:
    return [each.decision_id for each in found]


def ring(*decisions: Decision, capacity: int = 8) -> DecisionRing:
    made = DecisionRing(capacity)
    for each in decisions:
        made.record(each)
    return made


def test_keeps_the_newest_in_order() -> None:
    made = ring(*(decision(number) for number in range(5)), capacity=3)
    assert ids(list(made)) == ids(made.find()) == ["d2", "d3", "d4"]
    assert len(made) == 3


def test_limit_takes_the_newest_and_zero_means_a_hundred() -> None:
    made = ring(*(decision(number) for number in range(120)), capacity=200)
    assert ids(made.find(limit=2)) == ["d118", "d119"]
    assert ids(made.find())[0] == "d20"


def test_finds_by_request_and_by_kind() -> None:
    made = ring(
        decision(0, "a"), decision(1, "b"), decision(2, "a", DecisionKind.EVICTION), decision(3, "a"),
    )  # fmt: skip
    assert ids(made.find("a")) == ["d0", "d2", "d3"]
    assert ids(made.find("a", "routing")) == ["d0", "d3"]
    assert ids(made.find(kind="eviction")) == ["d2"]
    assert made.find("c") == []


def test_finds_the_newest_of_one_tenant() -> None:
    """Records of others about the same id take no place in the answer."""
    made = ring(*(decision(number, "a", tenant="red" if number < 2 else "blue") for number in range(5)))
    assert ids(made.find("a", limit=1, tenant="red")) == ["d1"]
    assert ids(made.find(tenant="blue")) == ["d2", "d3", "d4"]


def test_victim_and_beneficiary_find_the_preemption() -> None:
    made = ring(decision(0, "a", DecisionKind.PREEMPTION, victim="a", beneficiary="b"))
    assert ids(made.find("a")) == ids(made.find("b")) == ["d0"]


def test_what_left_the_ring_is_found_no_more() -> None:
    made = ring(decision(0, "a"), decision(1, "b"), decision(2, "a"), decision(3, "b"), capacity=2)
    assert ids(made.find("a")) == ["d2"]
    made.record(decision(4, "b"))
    assert made.find("a") == []
    assert ids(made.find("b")) == ["d3", "d4"]


def test_the_oldest_go_when_the_bytes_are_used_up() -> None:
    size = record_bytes(decision(0, "a"))
    made = DecisionRing(100, 3 * size)
    for number in range(5):
        made.record(decision(number, "a"))
    assert ids(made.find("a")) == ["d2", "d3", "d4"]
    assert made.bytes == 3 * size


def test_a_record_counts_with_its_candidates() -> None:
    candidates = tuple(Candidate(f"w{number}", 1.0, (("queue", 1.0),)) for number in range(32))
    small, large = decision(0, "a"), replace(decision(1, "a"), candidates=candidates)
    assert record_bytes(large) > 5 * record_bytes(small)
    made = DecisionRing(100, record_bytes(large))
    made.record(small)
    made.record(large)
    assert ids(list(made)) == ["d1"]


def test_one_answer_has_a_bounded_number_of_records() -> None:
    made = ring(*(decision(number, "a") for number in range(MAX_LISTED_DECISIONS + 5)), capacity=2_000)
    assert len(made.find(limit=2**32 - 1)) == MAX_LISTED_DECISIONS


def test_a_ring_needs_room() -> None:
    with pytest.raises(ValueError, match="capacity is 0 and max_bytes is 67108864; expected 1 or more"):
        DecisionRing(0)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FULL = Decision(
    decision_id="d1",
    kind=DecisionKind.ROUTING,
    time_ns=12_345,
    chosen="worker-1",
    request_id="r1",
    candidates=(
        Candidate("worker-0", 0.75, (("prefill", 0.5), ("queue", 0.25))),
        Candidate("worker-1", 0.0, figures=(("hit_blocks", 5.0),)),
        Candidate("worker-2", None, rejected="draining"),
    ),
    reasons=("lowest cost",),
    signal_ages=(("worker-0", 0.125), ("worker-1", 0.5)),
    victim="r2",
    beneficiary="r1",
    figures=(("hit_blocks", 3.0),),
    tenant="red",
)


def decision_of(record: decision_pb2.DecisionRecord) -> Decision:
    """Return the record that a reader of the message gets. Maps have no order: they come sorted by name."""
    return Decision(
        decision_id=record.decision_id,
        kind=DecisionKind(record.kind),
        time_ns=record.time_unix_nano,
        chosen=record.chosen,
        request_id=record.request_id,
        candidates=tuple(map(candidate_of, record.candidates)),
        reasons=tuple(record.reasons),
        signal_ages=tuple(sorted(record.signal_ages.items())),
        victim=record.victim,
        beneficiary=record.beneficiary,
        figures=tuple(sorted(record.figures.items())),
        tenant=record.tenant,
    )


def candidate_of(candidate: decision_pb2.Candidate) -> Candidate:
    return Candidate(
        name=candidate.name,
        cost=candidate.cost if candidate.HasField("cost") else None,
        terms=tuple(sorted(candidate.terms.items())),
        rejected=candidate.rejected,
        figures=tuple(sorted(candidate.figures.items())),
    )


def test_a_record_loses_nothing_on_the_wire() -> None:
    assert decision_of(decision_to_proto(FULL)) == FULL


def test_a_cost_of_zero_is_not_a_missing_one() -> None:
    costs = [candidate.HasField("cost") for candidate in decision_to_proto(FULL).candidates]
    assert costs == [True, True, False]


def test_the_trace_id_is_taken_out_of_the_traceparent() -> None:
    assert trace_id_of(TRACE) == "0af7651916cd43dd8448eb211c80319c"
    assert trace_id_of("") == trace_id_of("nonsense") == ""


COSTLY = {DecisionKind.REJECTION, DecisionKind.PREEMPTION, DecisionKind.MIGRATION}


@pytest.mark.parametrize("kind", DecisionKind)
def test_a_record_is_logged_at_info_when_it_costs_somebody_something(
    kind: DecisionKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "quire.decisions")
    ring(decision(1, "a", kind))
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.INFO if kind in COSTLY else logging.DEBUG,
        f"{kind.value}: worker-0",
    )


def test_the_log_line_shows_what_the_record_does_and_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire.decisions")
    candidates = (Candidate("worker-0", 0.5, (("prefill", 0.25),)), Candidate("worker-1", rejected="draining"))
    made = replace(
        decision(1, "a", traceparent=TRACEPARENT),
        candidates=candidates,
        figures=(("tied", 1.0),),
        reasons=("cheapest",),
    )
    ring(made)
    (record,) = caplog.records
    assert dict(trace_ids(record)) == {"trace_id": TRACEPARENT[3:35], "span_id": TRACEPARENT[36:52]}
    assert fields_of(record) == {
        "decision_id": "d1",
        "request_id": "a",
        "reasons": ["cheapest"],
        "figures": {"tied": 1.0},
        "candidates": [
            {"name": "worker-0", "cost": 0.5, "prefill": 0.25},
            {"name": "worker-1", "rejected": "draining"},
        ],
    }


def test_a_record_whose_level_is_off_is_kept_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.decisions")
    assert len(ring(decision(1, "a"))) == 1
    assert caplog.records == []


@pytest.mark.parametrize("kind", sorted(COSTLY))
def test_what_one_client_causes_again_and_again_fills_no_log(
    kind: DecisionKind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(log_line, "_LINES", {kind: RareLines(1.0, MAX_DECISION_LINES, lambda: now)})
    caplog.set_level(logging.INFO, "quire.decisions")
    many = tuple([Candidate(f"request-{number}" * 8, 0.5, (("prefill", 0.25),)) for number in range(64)])
    made = replace(decision(1, "r" * 128, kind), candidates=many, reasons=("why " * 1000,) * 9)
    whole = ring(*[made] * 20, capacity=20)
    assert [len(each.candidates) for each in whole] == [64] * 20, "records are whole"
    assert len(caplog.records) == MAX_DECISION_LINES
    shown = fields_of(caplog.records[0])
    assert [each["name"] for each in shown["candidates"]] == [each.name for each in many[:4]]
    assert (shown["more_candidates"], shown["more_reasons"]) == (60, 5)
    assert max(len(JsonFormatter("router").format(record)) for record in caplog.records) < 2_500
    now = 1.0
    ring(made)
    assert fields_of(caplog.records[-1])["lines_held_back"] == 20 - MAX_DECISION_LINES
