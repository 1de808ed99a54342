"""The spans of one sequence at the worker: whose children they are, when they begin and end, and how they fare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from common.contracts.errors import Cancelled, Unavailable
from common.contracts.lease import Admit
from common.contracts.transfers import Fetched
from common.contracts.types import BlockId, FinishReason, MissReason, SequenceId, Usage
from common.telemetry import context_from, span_context_of
from common.telemetry.spans import RecordedSpan
from gpuworker.engine.ports import Chunk
from gpuworker.scheduling.outcomes import Loaded, SequenceFinished
from gpuworker.server.spans import SequenceSpans
from tests.support.spans import CollectedSpans

SEQUENCE = SequenceId(3)
PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"
ADMIT = Admit(SEQUENCE, (BlockId(4), BlockId(5), BlockId(6)), 2, 32, MissReason.DIVERGED_AT, 2, "m-7")
USAGE = Usage(prompt_tokens=40, output_tokens=3)


class Traced:
    """One sequence and what it left."""

    def __init__(self) -> None:
        self._collected = CollectedSpans()
        parent = context_from(PARENT, "vendor=a:1")
        self.spans = SequenceSpans(self._collected.tracer, parent, {"quire.request_id": "r1"})

    def ended(self) -> list[RecordedSpan]:
        return list(self._collected.ended())

    def named(self, name: str) -> RecordedSpan:
        return self._collected.named(name)

    def finish(self, reason: FinishReason = FinishReason.LENGTH, message: str = "") -> None:
        self.spans.finished(SequenceFinished(SEQUENCE, reason, USAGE, None, message))


@pytest.fixture
def traced() -> Traced:
    return Traced()


def test_the_sequence_is_a_child_of_the_call_and_everything_else_of_the_sequence(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.spans.chunk(Chunk(SEQUENCE, 32, 8, 100, 200))
    traced.spans.chunk(Chunk(SEQUENCE, 40, 1, 200, 300, decode=True))
    traced.finish()
    root = traced.named("sequence")
    assert root.parent is not None
    assert (root.parent.trace_id, root.parent.span_id) == (0xABC, 0xDEF)
    assert (root.kind, traced.named("reserve").kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    for span in traced.ended():
        assert span.context.trace_id == 0xABC
        assert span is root or (span.parent is not None and span.parent.span_id == root.context.span_id)
        assert span.context.trace_state.to_header() == "vendor=a:1"
    assert {span.name for span in traced.ended()} == {"sequence", "reserve", "prefill chunk", "decode"}


def test_the_manager_hangs_its_span_under_the_wait_for_blocks(traced: Traced) -> None:
    handed = span_context_of(traced.spans.reserve_traceparent)
    traced.spans.admitted(ADMIT)
    assert handed.span_id == traced.named("reserve").context.span_id
    assert handed.trace_id == 0xABC
    assert handed.trace_flags.sampled


def test_the_wait_for_blocks_ends_with_what_was_granted(traced: Traced) -> None:
    assert traced.ended() == []
    traced.spans.admitted(ADMIT)
    assert dict(traced.named("reserve").attributes or {}) == {
        "quire.cached_tokens": 32,
        "quire.miss_reason": "diverged_at",
        "quire.blocks": 3,
        "quire.shared_blocks": 2,
        "quire.decision_id": "m-7",
    }


def test_each_prefill_chunk_is_a_span_at_the_times_of_its_step(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.spans.chunk(Chunk(SEQUENCE, 32, 6, 1_000, 2_000))
    traced.spans.chunk(Chunk(SEQUENCE, 38, 2, 2_000, 2_500))
    traced.finish()
    chunks = [span for span in traced.ended() if span.name == "prefill chunk"]
    assert [(span.start_time, span.end_time) for span in chunks] == [(1_000, 2_000), (2_000, 2_500)]
    assert [dict(span.attributes or {}) for span in chunks] == [
        {"quire.start": 32, "quire.scheduled_tokens": 6},
        {"quire.start": 38, "quire.scheduled_tokens": 2},
    ]


def test_all_decode_steps_are_one_span_from_the_first_to_the_last(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    for begin in (3_000, 4_000, 5_000):
        traced.spans.chunk(Chunk(SEQUENCE, 40 + begin // 1000, 1, begin, begin + 900, decode=True))
    traced.finish()
    decode = traced.named("decode")
    assert (decode.start_time, decode.end_time) == (3_000, 5_900)
    assert dict(decode.attributes or {}) == {"quire.steps": 3, "quire.output_tokens": 3}


def test_a_preemption_and_the_admission_after_it_are_events(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.spans.preempted()
    traced.spans.admitted(ADMIT)
    traced.finish()
    root = traced.named("sequence")
    assert [event.name for event in root.events] == ["preempted", "admitted again"]
    assert dict(root.events[1].attributes or {}) == {"quire.cached_tokens": 32}


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_sequence_that_ended_by_itself_has_no_error(traced: Traced, reason: FinishReason) -> None:
    traced.spans.admitted(ADMIT)
    traced.finish(reason)
    assert {span.status.status_code for span in traced.ended()} == {StatusCode.UNSET}
    assert (traced.named("sequence").attributes or {})["quire.finish_reason"] == str(reason)


BAD_ENDS = {
    "expired": (FinishReason.DEADLINE, "", "deadline exceeded", "DEADLINE_EXCEEDED"),
    "failed": (FinishReason.ERROR, "", "error", "INTERNAL"),
    "failed with words": (FinishReason.ERROR, "the device is gone", "the device is gone", "INTERNAL"),
}


@pytest.mark.parametrize("how", BAD_ENDS)
def test_a_bad_end_after_the_grant_is_the_sequences_alone(traced: Traced, how: str) -> None:
    reason, message, said, fault = BAD_ENDS[how]
    traced.spans.admitted(ADMIT)
    traced.finish(reason, message)
    root, reserve = traced.named("sequence"), traced.named("reserve")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, said)
    assert root.attributes["error.type"] == fault
    assert reserve.status.status_code is StatusCode.UNSET


def test_a_sequence_that_its_client_ended_is_no_error_of_the_worker(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.finish(FinishReason.CANCELLED)
    root = traced.named("sequence")
    assert (root.status.status_code, root.attributes["quire.ended"]) == (StatusCode.UNSET, "cancelled")
    assert "error.type" not in root.attributes


ENDS: dict[str, tuple[Callable[[Traced], None], str, StatusCode]] = {
    "cancelled": (lambda traced: traced.finish(FinishReason.CANCELLED), "CANCELLED", StatusCode.UNSET),
    "refused": (lambda traced: traced.spans.refused(Cancelled("cancelled")), "CANCELLED", StatusCode.UNSET),
    "full": (lambda traced: traced.spans.refused(Unavailable("cancelled")), "UNAVAILABLE", StatusCode.ERROR),
    "broken": (lambda traced: traced.spans.refused(ValueError("cancelled")), "INTERNAL", StatusCode.ERROR),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_bad_end_while_it_waits_is_that_of_the_wait_too(traced: Traced, how: str) -> None:
    end, fault, of_server = ENDS[how]
    end(traced)
    reserve, root = traced.ended()
    assert (reserve.name, reserve.status.status_code, reserve.status.description) == (
        "reserve",
        StatusCode.ERROR,
        "cancelled",
    )
    assert reserve.attributes["error.type"] == fault
    assert (root.name, root.status.status_code) == ("sequence", of_server)


def test_every_span_is_ended_exactly_once(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.spans.chunk(Chunk(SEQUENCE, 32, 8, 100, 200))
    traced.finish()
    ids = [span.context.span_id for span in traced.ended()]
    assert len(ids) == len(set(ids)) == 3
    assert all(not span.is_recording() for span in traced.ended())


def test_what_was_loaded_from_host_memory_is_an_event_and_a_figure_of_the_sequence(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.spans.loaded(Loaded(47, 0.25))
    usage = replace(USAGE, cached_tokens=32, host_cached_tokens=16)
    traced.spans.finished(SequenceFinished(SEQUENCE, FinishReason.LENGTH, usage))
    root = traced.named("sequence")
    (event,) = [each for each in root.events if each.name == "loaded from host memory"]
    assert dict(event.attributes or {}) == {"quire.loaded_blocks": 47, "quire.load_seconds": 0.25}
    assert (root.attributes or {})["quire.host_cached_tokens"] == 16


def test_what_was_fetched_stands_at_the_wait_for_blocks_and_at_the_sequence(traced: Traced) -> None:
    traced.spans.admitted(replace(ADMIT, fetched=Fetched(47, 64, 0.031, "disk")))
    traced.spans.admitted(replace(ADMIT, fetched=Fetched(3, 3, 0.5, "worker-1")))
    usage = replace(USAGE, cached_tokens=32, disk_cached_tokens=16, peer_cached_tokens=8)
    traced.spans.finished(SequenceFinished(SEQUENCE, FinishReason.LENGTH, usage))
    root, reserve = traced.named("sequence"), traced.named("reserve")
    names = ("fetched_blocks", "fetch_asked_blocks", "fetch_seconds", "fetch_source")
    assert [(reserve.attributes or {})[f"quire.{name}"] for name in names] == [47, 64, 0.031, "disk"]
    (again,) = [each for each in root.events if each.name == "admitted again"]
    assert [(again.attributes or {})[f"quire.{name}"] for name in names] == [3, 3, 0.5, "worker-1"]
    figures = root.attributes or {}
    assert (figures["quire.disk_cached_tokens"], figures["quire.peer_cached_tokens"]) == (16, 8)
    assert "quire.host_cached_tokens" not in figures


def test_a_sequence_that_loads_nothing_has_no_figure_of_it(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.finish()
    assert "quire.host_cached_tokens" not in (traced.named("sequence").attributes or {})


def test_the_decode_says_how_many_drafts_it_verified(traced: Traced) -> None:
    traced.spans.admitted(ADMIT)
    traced.spans.chunk(Chunk(SEQUENCE, 40, 1, 1_000, 2_000, decode=True, drafts=5))
    traced.spans.chunk(Chunk(SEQUENCE, 44, 1, 2_000, 3_000, decode=True, drafts=2))
    usage = replace(USAGE, drafted_tokens=7, accepted_draft_tokens=4)
    usage = replace(usage, model_drafted_tokens=5, accepted_model_draft_tokens=3)
    traced.spans.finished(SequenceFinished(SEQUENCE, FinishReason.LENGTH, usage))
    attributes = traced.named("decode").attributes or {}
    assert (attributes["quire.drafted_tokens"], attributes["quire.accepted_draft_tokens"]) == (7, 4)
    assert (attributes["quire.model_drafted_tokens"], attributes["quire.accepted_model_draft_tokens"]) == (5, 3)
    assert attributes["quire.steps"] == 2
