"""Spans of waits for blocks, from a real ledger's reports and batches into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from common.contracts.lease import Inventory, InventorySequence, Report, Reserve
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId, SequencePhase
from common.telemetry.spans import RecordedSpan
from kvmanager.sessions.reserve_spans import ReserveSpans
from tests.support.kvmanager.ledgers import make_ledger
from tests.support.spans import CollectedSpans

S0, S1, S2 = map(SequenceId, range(3))
CAME_NS = 1_000_000_000
HASHES = tuple(BlockHash(bytes([index]) * 16) for index in range(1, 9))


def traceparent(number: int, sampled: bool = True) -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-{int(sampled):02d}"


def reserve(sequence: SequenceId, num_tokens: int = 32, max_len: int = 32, sampled: bool = True) -> Reserve:
    name, parent = f"r{sequence}", traceparent(sequence, sampled)
    return Reserve(sequence, num_tokens, max_len, request_id=name, traceparent=parent, tracestate="vendor=a:1")


@dataclass
class Traced:
    """A ledger of some blocks, and the spans of its session."""

    num_blocks: int
    collected: CollectedSpans = field(default_factory=CollectedSpans)

    def __post_init__(self) -> None:
        self.spans = ReserveSpans(self.collected.tracer, "w0")
        self.ledger = make_ledger(self.num_blocks, watermark=0.0)
        self.open(Inventory())

    def open(self, inventory: Inventory) -> None:
        self.ledger.rebuild(inventory)
        self.spans.opened(inventory, self.ledger.schedule(), self.ledger.drain_decisions(), CAME_NS)

    def report(self, **columns: object) -> None:
        report = Report(**columns)  # type: ignore[arg-type]
        self.ledger.apply_report(report)
        self.spans.reported(report, self.ledger.schedule(), self.ledger.drain_decisions(), CAME_NS)

    @property
    def ended(self) -> Sequence[RecordedSpan]:
        return self.collected.ended()


def preempting() -> Traced:
    """Return a pool that is used up, in which the first of two requests stalls: the later one must give way."""
    traced = Traced(4)
    traced.report(reserve=(reserve(S0, 16, 64), reserve(S1, 16, 64)))
    traced.report(lease_want=2)
    traced.report(bind=((S0, BlockId(2)), (S0, BlockId(3))), lease_want=1, stalled=(S0,))
    return traced


def kinds(span: RecordedSpan) -> list[object]:
    """Return the kinds of decision on a span, in order."""
    return [(event.attributes or {})["quire.decision.kind"] for event in span.events]


def linked(span: RecordedSpan) -> list[int]:
    """Return the numbers of the requests that a span links to."""
    return [link.context.trace_id - 1 for link in span.links]


def of_request(span: RecordedSpan, number: int) -> bool:
    return span.context is not None and span.context.trace_id == number + 1


def test_admission_at_once_is_one_span_with_the_grant() -> None:
    traced = Traced(4)
    traced.report(reserve=(reserve(S0),))
    (span,) = traced.ended
    assert (span.name, of_request(span, 0), kinds(span)) == ("kvmanager.reserve", True, ["grant"])
    assert span.parent is not None
    assert (span.parent.span_id, span.kind) == (1, SpanKind.SERVER)
    attributes = dict(span.attributes or {})
    assert attributes["quire.request_id"] == "r0"
    assert attributes["quire.miss_reason"] == "disabled"
    assert attributes["quire.blocks"] == 2


def test_spans_begin_when_the_report_came_though_they_are_made_after_its_answer() -> None:
    traced = preempting()
    traced.report(preempted=((S1, 17),), stalled=(S0,))
    traced.report(finished=((S0, FinishReason.STOP),))
    waits = [span for span in traced.ended if span.name == "kvmanager.reserve"]
    assert len(waits) == 3  # the victim waited twice
    assert {span.context.trace_state.to_header() for span in traced.ended} == {"vendor=a:1"}
    assert {span.start_time for span in waits} == {CAME_NS}


def test_request_that_is_not_sampled_leaves_nothing() -> None:
    traced = Traced(4)
    traced.report(reserve=(reserve(S0, sampled=False), Reserve(S1, 16, 16)))
    traced.report(finished=((S0, FinishReason.STOP),))
    traced.spans.close()
    assert traced.ended == ()


def test_span_lasts_until_the_blocks_come() -> None:
    traced = Traced(2)
    traced.report(reserve=(reserve(S0),))
    traced.report(reserve=(reserve(S1),))
    assert len(traced.ended) == 1
    traced.report(finished=((S0, FinishReason.STOP),))
    assert of_request(traced.ended[1], 1)
    assert traced.ended[1].status.status_code is StatusCode.UNSET


def test_evictions_done_for_a_request_stand_before_its_grant() -> None:
    traced = Traced(2)
    cached = Reserve(S0, 32, 32, block_hashes=HASHES[:2])
    traced.report(reserve=(cached,))
    traced.report(seal=((BlockId(0), HASHES[0]), (BlockId(1), HASHES[1])))
    traced.report(finished=((S0, FinishReason.STOP),))
    traced.report(reserve=(reserve(S1),))
    (span,) = traced.ended
    assert kinds(span) == ["eviction", "grant"]


def test_preempted_and_beneficiary_link_to_each_other() -> None:
    traced = preempting()
    traced.report(preempted=((S1, 17),), stalled=(S0,))
    first, second, preempt = traced.ended
    assert (first.name, second.name) == ("kvmanager.reserve", "kvmanager.reserve")
    assert (preempt.name, of_request(preempt, 0), linked(preempt)) == ("kvmanager.preempt", True, [1])
    assert kinds(preempt) == ["preemption"]
    traced.report(finished=((S0, FinishReason.STOP),))
    again = traced.ended[3]
    assert (again.name, of_request(again, 1), linked(again)) == ("kvmanager.reserve", True, [0])
    assert kinds(again) == ["preemption", "grant"]


def test_victim_that_finishes_instead_ends_the_preemption() -> None:
    traced = preempting()
    traced.report(finished=((S1, FinishReason.CANCELLED),))
    assert [span.name for span in traced.ended] == ["kvmanager.reserve", "kvmanager.reserve", "kvmanager.preempt"]


def test_a_request_that_fits_no_pool_is_no_error_of_the_manager_and_has_the_numbers() -> None:
    traced = Traced(2)
    traced.report(reserve=(reserve(S0, 32, 100),))
    (span,) = traced.ended
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["quire.ended"] == "refused: 100 tokens need 7 blocks; the pool has 2"
    assert kinds(span) == ["rejection"]


@pytest.mark.parametrize(
    ("reason", "fault"),
    [(FinishReason.CANCELLED, ""), (FinishReason.ERROR, ""), (FinishReason.DEADLINE, "DEADLINE_EXCEEDED")],
)
def test_request_that_ends_while_it_waits_is_an_error_of_the_manager_if_it_came_too_late(
    reason: FinishReason, fault: str
) -> None:
    traced = Traced(2)
    traced.report(reserve=(reserve(S0), reserve(S1)))
    traced.report(finished=((S1, reason),))
    span = traced.ended[1]
    assert (span.status.status_code is StatusCode.ERROR, span.attributes.get("error.type", "")) == (bool(fault), fault)
    said = span.status.description if fault else span.attributes["quire.ended"]
    assert said == f"finished ({reason}) before it was admitted"


def test_lost_session_ends_what_waits_with_an_error() -> None:
    traced = Traced(2)
    traced.report(reserve=(reserve(S0), reserve(S1)))
    traced.spans.close()
    assert traced.ended[1].status.description == "the session with the worker was lost"
    assert traced.ended[1].attributes["error.type"] == "UNAVAILABLE"
    assert len(traced.ended) == 2


def test_sequence_that_waits_in_an_inventory_has_a_span() -> None:
    traced = Traced(2)
    running = InventorySequence(reserve(S0), SequencePhase.RUNNING, 0, (BlockId(0), BlockId(1)))
    traced.open(Inventory((running, InventorySequence(reserve(S1), SequencePhase.WAITING, 1))))
    assert len(traced.ended) == 0
    traced.report(finished=((S0, FinishReason.STOP),))
    (span,) = traced.ended
    assert of_request(span, 1)


def test_nothing_is_kept_of_requests_that_are_gone() -> None:
    traced = Traced(4)
    traced.report(reserve=(reserve(S0), reserve(S1)))
    traced.report(finished=((S0, FinishReason.STOP), (S1, FinishReason.STOP)))
    assert (traced.spans._reserves, traced.spans._waiting, traced.spans._preempting) == ({}, {}, {})
