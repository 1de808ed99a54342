"""Refused requests: found by their ids, few in the ring however many come, one line each for the first of a reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from common.contracts.clock import ManualClock
from common.contracts.limits import (
    ALIKE_REFUSALS_BURST,
    ALIKE_REFUSALS_PER_SECOND,
    MAX_REFUSAL_GROUPS,
    MAX_REFUSAL_LINES,
    REFUSALS_BURST,
)
from common.contracts.types import Decision, DecisionKind
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing, record_bytes
from router.contracts.refusals import FAULTS, Refusal
from router.observe.metrics import RouterMetrics
from router.observe.refusals import Refusals
from router.observe.refused_records import LEFT_OUT, RefusedRecords


@dataclass
class Watched:
    """The watch with its surroundings; time stands still unless a test moves it."""

    ring: DecisionRing = field(default_factory=lambda: DecisionRing(10_000))
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    max_bytes: int = 1 << 24
    now: float = 0.0

    def __post_init__(self) -> None:
        self.clock, self.made = ManualClock(0.0), 0
        self.records = RefusedRecords(self.ring, self.max_bytes, lambda: self.now)
        metrics = RouterMetrics(self.registry)
        self.watch = Refusals(metrics, self.records, self.clock, self._id, lambda: self.now)

    def _id(self) -> str:
        self.made += 1
        return f"d{self.made}"

    def refuse(self, request_id: str, reason: str = "INVALID_FIELD", owner: str = "", client_id: str = "") -> None:
        self.watch.note_refusal(refusal(request_id, reason, owner, client_id), self.watch.now_ns())

    def ids(self, name: str) -> list[str]:
        return [each.request_id for each in self.records.find(DecisionQuery(name))]

    def counted(self, reason: str) -> float | None:
        labels = {"api": "openai", "method": "/v1/x", "code": "400", "reason": reason}
        return self.registry.get_sample_value("quire:refusals_total", labels)


def refusal(request_id: str, reason: str = "INVALID_FIELD", owner: str = "", client_id: str = "") -> Refusal:
    return Refusal("openai", "/v1/x", "400", reason, request_id, client_id, owner)


def test_a_refusal_is_counted_and_found_by_its_own_id_and_its_clients() -> None:
    watched = Watched()
    watched.refuse("one", client_id="named")
    watched.refuse("two", client_id="named")
    watched.refuse("three")
    assert watched.counted("INVALID_FIELD") == 3
    assert (watched.ids("one"), watched.ids("named"), watched.ids("three")) == (["one"], ["one", "two"], ["three"])
    assert [each.request_id for each in watched.ring] == ["one", "two", "three"]


def test_what_a_record_says_already_is_recorded_once() -> None:
    watched = Watched()
    made = Decision("made", DecisionKind.REJECTION, watched.watch.now_ns(), "router.queue", "one")
    watched.records.record(made)
    watched.refuse("one", "OVERLOADED", client_id="named")
    watched.ring.record(Decision("end", DecisionKind.OUTCOME, watched.watch.now_ns(), "INTERNAL", "two"))
    watched.refuse("two", "INTERNAL")
    assert watched.records.find(DecisionQuery("one")) == [made]
    assert watched.records.find(DecisionQuery("named")) == [made]
    assert watched.ids("two") == []
    assert [each.decision_id for each in watched.ring] == ["made", "end"]


def test_an_earlier_end_under_the_same_id_is_that_of_another_request() -> None:
    watched = Watched()
    watched.refuse("again")
    watched.clock.advance(1.0)
    watched.refuse("again")
    assert watched.ids("again") == ["again", "again"]


def test_a_flood_enters_the_ring_at_its_rate_and_says_how_many_are_left_out() -> None:
    watched = Watched()
    for number in range(3 * ALIKE_REFUSALS_BURST):
        watched.refuse(f"r{number}")
    watched.refuse("other", "MODEL_NOT_FOUND")
    watched.refuse("other tenant", owner="acme")
    in_ring = [each.request_id for each in watched.ring]
    assert in_ring == [*(f"r{number}" for number in range(ALIKE_REFUSALS_BURST)), "other", "other tenant"]
    watched.now = 1.0 / ALIKE_REFUSALS_PER_SECOND
    watched.refuse("later")
    last = list(watched.ring)[-1]
    assert (last.request_id, dict(last.figures)) == ("later", {LEFT_OUT: 2.0 * ALIKE_REFUSALS_BURST})
    assert watched.ids(f"r{3 * ALIKE_REFUSALS_BURST - 1}") == [f"r{3 * ALIKE_REFUSALS_BURST - 1}"]


def test_all_refusals_together_enter_the_ring_at_a_rate_too() -> None:
    watched = Watched()
    for owner in range(2 * REFUSALS_BURST // ALIKE_REFUSALS_BURST):
        for number in range(ALIKE_REFUSALS_BURST):
            watched.refuse(f"{owner}-{number}", owner=f"tenant {owner}")
    assert len(watched.ring) == REFUSALS_BURST


def test_a_flood_pushes_out_its_own_kind_alone_and_stays_within_its_memory() -> None:
    size = record_bytes(Decision("d1", DecisionKind.REJECTION, 0, "INVALID_FIELD", "r0", reasons=("x" * 60,)))
    watched = Watched(max_bytes=4 * size * MAX_REFUSAL_GROUPS)
    watched.refuse("rare", "UNAUTHENTICATED")
    watched.refuse("others", owner="acme")
    for number in range(1_000):
        watched.refuse(f"r{number}")
    assert (watched.ids("rare"), watched.ids("others"), watched.ids("r999")) == (["rare"], ["others"], ["r999"])
    assert watched.ids("r900") == []
    for number in range(MAX_REFUSAL_GROUPS):
        watched.refuse(f"t{number}", owner=f"tenant {number}")
    assert watched.ids("rare") == []
    assert watched.ids(f"t{MAX_REFUSAL_GROUPS - 1}") == [f"t{MAX_REFUSAL_GROUPS - 1}"]


def test_other_records_go_to_the_ring_as_they_are() -> None:
    watched = Watched()
    decision = Decision("d", DecisionKind.ADMISSION, 0, "admitted", "r")
    for _ in range(2 * REFUSALS_BURST):
        watched.records.record(decision)
    assert len(watched.ring) == 2 * REFUSALS_BURST
    assert watched.records.find(DecisionQuery("r")) == []


def test_each_reason_has_some_lines_and_the_rest_is_counted_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    for number in range(MAX_REFUSAL_LINES + 7):
        watched.refuse(f"r{number}")
    watched.refuse("other", "MODEL_NOT_FOUND")
    watched.now = 1.0
    watched.refuse("later", client_id="named", owner="acme")
    lines = [each for each in caplog.records if each.name == "router.observe.refusals"]
    assert [each.__dict__["request_id"] for each in lines] == [
        *(f"r{number}" for number in range(MAX_REFUSAL_LINES)),
        "other",
        "later",
    ]
    last = lines[-1]
    assert (last.levelno, last.getMessage()) == (logging.INFO, f"refused: {FAULTS['INVALID_FIELD']}")
    given = {name: last.__dict__[name] for name in ("api", "method", "code", "reason", "client_id", "tenant")}
    assert given == {
        "api": "openai",
        "method": "/v1/x",
        "code": "400",
        "reason": "INVALID_FIELD",
        "client_id": "named",
        "tenant": "acme",
    }
    assert last.__dict__["lines_held_back"] == 7
    assert {each.name for each in caplog.records} == {"router.observe.refusals"}, "the record has no line of its own"


def test_a_client_that_left_is_found_by_its_id_and_in_no_list() -> None:
    watched = Watched()
    watched.refuse("gone", "CANCELLED", client_id="named")
    assert (watched.ids("gone"), watched.ids("named"), len(watched.ring)) == (["gone"], ["gone"], 0)


def test_a_probe_is_counted_alone() -> None:
    watched = Watched()
    watched.watch.count_refusal(refusal("probe", "UNAVAILABLE"))
    assert watched.counted("UNAVAILABLE") == 1
    assert watched.ids("probe") == []
    assert len(watched.ring) == 0
