"""The keeper of bad requests: what it keeps, what it builds, and that rate, records and waiting are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from common.contracts.errors import Unavailable
from common.contracts.limits import KEPT_TRACES_BURST, KEPT_TRACES_PER_SECOND, MAX_KEPT_RECORDS, MAX_TRACES_TO_BUILD
from common.contracts.types import Decision, DecisionKind
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing, record_bytes
from common.telemetry.spans import RecordedSpan
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.outcome import Outcome
from router.observe.kept_records import KeptRecords
from router.observe.metrics import RouterMetrics
from router.observe.record_spans import EndedRequest
from router.observe.record_trace import TraceHead
from router.observe.tail_keeper import AskManager, TailKeeper
from router.observe.tail_rules import Objective, Rule
from router.observe.trace_codec import UNREAD
from tests.support.waiting import until

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
ORDINARY = Outcome(ended="length", before=(("prefill", 0.5),), has_first_token=True)
PREEMPTED = replace(ORDINARY, preemptions=1)
FAILED = replace(ORDINARY, ended="INTERNAL", failure="internal error")


@dataclass
class Kept:
    """A keeper with its surroundings; time stands still unless a test moves it."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    ring: DecisionRing = field(default_factory=lambda: DecisionRing(1000))
    records: KeptRecords = field(default_factory=lambda: KeptRecords(1 << 20))
    spans: list[RecordedSpan] = field(default_factory=list)
    calls: list[pb.ListDecisionsRequest] = field(default_factory=list)
    answers: list[Decision] = field(default_factory=list)
    now: float = 0.0

    def keeper(self, ask: AskManager | None = None) -> TailKeeper:
        metrics, slo = RouterMetrics(self.registry), Objective(ttft=1.0)
        return TailKeeper(slo, self.ring, self.records, metrics, self.spans.extend, ask or self.ask, lambda: self.now)

    async def ask(self, calls: Sequence[pb.ListDecisionsRequest]) -> Sequence[pb.ListDecisionsResponse]:
        self.calls.extend(calls)
        found = [decision_to_proto(each) for each in self.answers]
        return [
            pb.ListDecisionsResponse(decisions=[each for each in found if each.request_id == call.request_id])
            for call in calls
        ]

    def counted(self, name: str, rule: Rule) -> float | None:
        return self.registry.get_sample_value(f"quire:{name}_total", {"rule": rule.value})


def ended(request_id: str = "r1", outcome: Outcome | None = PREEMPTED) -> EndedRequest:
    return EndedRequest(request_id, 1_000, 2_000_000_000, outcome)


def head(request_id: str = "r1") -> TraceHead:
    return TraceHead(TRACE_ID, None, "chat small", {"quire.request_id": request_id})


@asynccontextmanager
async def building(keeper: TailKeeper) -> AsyncIterator[None]:
    task = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_kept_request_has_a_trace_with_the_records_of_both_services() -> None:
    kept = Kept(answers=[Decision("m-1", DecisionKind.GRANT, 5_000, "2 fresh blocks", "r1")])
    kept.ring.record(Decision("d-1", DecisionKind.ADMISSION, 2_000, "admitted", "r1"))
    kept.ring.record(Decision("d-0", DecisionKind.ADMISSION, 500, "admitted", "r1"))  # an earlier one of this id
    keeper = kept.keeper()
    async with building(keeper):
        assert keeper.rules(PREEMPTED) == (Rule.PREEMPTED,)
        keeper.keep(head(), ended())
        await until(lambda: bool(kept.spans))
    assert {span.name for span in kept.spans} == {"chat small", "prefill", "decode"}
    assert {span.context.trace_id for span in kept.spans} == {TRACE_ID}
    root = next(span for span in kept.spans if span.parent is None)
    events = [(event.attributes or {}).get("quire.decision.id") for event in root.events]
    assert events == ["d-1", "m-1"]
    found = kept.records.find(DecisionQuery("r1"))
    assert {each.decision_id for each in found} == {"d-1", "m-1"}
    assert (kept.counted("kept_requests", Rule.PREEMPTED), kept.counted("kept_requests_left_out", Rule.PREEMPTED)) == (
        1,
        0,
    )


async def test_a_sampled_request_keeps_its_spans_and_its_records() -> None:
    kept = Kept(answers=[Decision("m-1", DecisionKind.GRANT, 5_000, "2 fresh blocks", "r1")])
    keeper = kept.keeper()
    async with building(keeper):
        keeper.keep(None, ended())
        await until(lambda: len(kept.records.find(DecisionQuery("r1"))) == 1)
    assert kept.spans == []


async def test_a_manager_that_does_not_answer_is_named_in_the_trace() -> None:
    async def silent(calls: Sequence[pb.ListDecisionsRequest]) -> Sequence[pb.ListDecisionsResponse]:
        raise Unavailable("no KV manager answers at 127.0.0.1:1; start one")

    kept = Kept()
    keeper = kept.keeper(silent)
    async with building(keeper):
        for name in ("r1", "r2"):
            keeper.keep(head(name), ended(name))
        await until(lambda: sum(span.parent is None for span in kept.spans) == 2)
    roots = [span.attributes or {} for span in kept.spans if span.parent is None]
    assert [each["quire.request_id"] for each in roots] == ["r1", "r2"]
    assert {each[UNREAD] for each in roots} == {"the KV manager: no KV manager answers at 127.0.0.1:1; start one"}


async def test_each_rule_keeps_a_bounded_number_a_second() -> None:
    kept = Kept()
    keeper = kept.keeper()
    assert sum(bool(keeper.refuses()) for _ in range(3 * KEPT_TRACES_BURST)) == KEPT_TRACES_BURST
    assert kept.counted("kept_requests_left_out", Rule.REFUSED) == 2 * KEPT_TRACES_BURST
    assert keeper.rules(FAILED) == (Rule.FAILED,), "a flood of refusals leaves room for the other rules"
    kept.now += 2.0
    assert sum(bool(keeper.refuses()) for _ in range(KEPT_TRACES_BURST)) == 2 * KEPT_TRACES_PER_SECOND


async def test_a_request_of_two_rules_is_kept_while_one_of_them_has_room() -> None:
    keeper = Kept().keeper()
    both = replace(FAILED, preemptions=1)
    found = [keeper.rules(both) for _ in range(3 * KEPT_TRACES_BURST)]
    assert sum(map(bool, found)) == 2 * KEPT_TRACES_BURST
    assert keeper.rules(PREEMPTED) == keeper.rules(FAILED) == ()


async def test_an_ordinary_request_takes_nothing() -> None:
    kept = Kept()
    keeper = kept.keeper()
    assert {keeper.rules(ORDINARY) for _ in range(1000)} == {()}
    assert [kept.counted("kept_requests", rule) for rule in Rule] == [0] * len(Rule)
    assert [kept.counted("kept_requests_left_out", rule) for rule in Rule] == [0] * len(Rule)


async def test_what_waits_for_a_silent_manager_is_bounded() -> None:
    kept = Kept()
    keeper, taken = kept.keeper(), 0
    for number in range(2 * MAX_TRACES_TO_BUILD):  # nothing builds
        kept.now += 1.0
        if keeper.rules(FAILED):
            keeper.keep(head(), ended(f"r{number}"))
            taken += 1
    assert taken == MAX_TRACES_TO_BUILD
    assert kept.counted("kept_requests_left_out", Rule.FAILED) == MAX_TRACES_TO_BUILD
    async with building(keeper):
        await until(lambda: sum(span.parent is None for span in kept.spans) == taken)
    assert keeper.rules(FAILED)


async def test_the_records_of_one_request_are_bounded() -> None:
    kept = Kept()
    for number in range(3 * MAX_KEPT_RECORDS):
        kept.ring.record(Decision(f"d-{number}", DecisionKind.MIGRATION, 2_000 + number, "worker-1", "r1"))
    keeper = kept.keeper()
    keeper.keep(head(), ended())
    found = kept.records.find(DecisionQuery("r1"))
    assert [each.decision_id for each in found] == [f"d-{number}" for number in range(128, 192)]
    async with building(keeper):
        await until(lambda: bool(kept.calls))
    assert [call.limit for call in kept.calls] == [MAX_KEPT_RECORDS]


def records_of(most: int, names: Iterable[str]) -> tuple[KeptRecords, int]:
    """Return a store of so many records' bytes after a record of each name, and the most that it ever had."""
    record = Decision("d-0000", DecisionKind.GRANT, 1, "2 fresh blocks", "r0000")
    records, peak = KeptRecords(most * record_bytes(record)), 0
    for number, name in enumerate(names):
        records.add(name, [replace(record, decision_id=f"d-{number:04}", request_id=name)])
        peak = max(peak, records.bytes)
    return records, peak // record_bytes(record)


def test_the_memory_of_kept_records_is_bounded_and_the_oldest_requests_go_first() -> None:
    records, peak = records_of(10, (f"r{number:04}" for number in range(1_000)))
    assert (peak, len(records)) == (10, 10)
    assert records.find(DecisionQuery("r0990"))
    assert not records.find(DecisionQuery("r0989"))


def test_one_request_with_too_many_records_takes_no_more_memory() -> None:
    records, peak = records_of(10, ("r0000" for _ in range(1_000)))
    assert peak == 10
    assert len(records) <= 1


def test_a_request_without_records_takes_no_place() -> None:
    records = KeptRecords(1 << 20)
    for number in range(1_000):
        records.add(f"r{number}", ())
    assert (len(records), records.bytes) == (0, 0)


def test_kept_records_pass_the_filters_of_a_query() -> None:
    records = KeptRecords(1 << 20)
    grant = Decision("d-1", DecisionKind.GRANT, 1, "2 fresh blocks", "r1", tenant="red")
    records.add("r1", [grant])
    records.add("r1", [grant])
    assert records.find(DecisionQuery("r1")) == [grant]
    assert records.find(DecisionQuery("r1", "grant", "red")) == [grant]
    assert records.find(DecisionQuery("r1", tenant="blue")) == records.find(DecisionQuery("r2")) == []
