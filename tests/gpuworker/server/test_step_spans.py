"""Spans of steps: what they say, the links between a step and its traced sequences, and that nobody pays unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.trace import SpanContext

from common.contracts.errors import Cancelled
from common.contracts.limits import MAX_SPAN_ITEMS
from common.contracts.types import SequenceId
from common.telemetry import context_from
from gpuworker.engine.ports import EngineOutputs, StepRecord
from gpuworker.server.spans import SequenceSpans
from gpuworker.server.step_spans import StepSpans
from tests.support.gpuworker.fake_engine_ports import InstantRunner
from tests.support.gpuworker.worker_harness import TRACED, Served, served, submit
from tests.support.spans import CollectedSpans

RECORD = StepRecord(
    step=9, begin_ns=1_000, end_ns=2_000, decodes=3, prefill_tokens=40, drafts=2, predicted=0.5, planning=0.25,
    guessing=0.125, waiting=0.5, running=0.75, finishing=0.0625, traced=(SequenceId(1), SequenceId(2)),
)  # fmt: skip


def steps_of(worker: Served) -> list[tuple[int, int]]:
    """Return decodes and prefill tokens of the steps with a span, in their order."""
    spans = [span.attributes for span in worker.collected.ended() if span.name == "step"]
    return [(int(str(each["quire.decodes"])), int(str(each["quire.prefill_tokens"]))) for each in spans]


def test_a_step_says_what_it_computed_and_what_took_the_time() -> None:
    collected = CollectedSpans()
    StepSpans(collected.tracer).add(RECORD, lambda _: None)
    (span,) = collected.ended()
    assert (span.name, span.start_time, span.end_time, span.parent, span.links) == ("step", 1_000, 2_000, None, [])
    assert span.attributes == {
        "quire.step": 9,
        "quire.decodes": 3,
        "quire.prefill_tokens": 40,
        "quire.drafted_tokens": 2,
        "quire.traced_sequences": 2,
        "quire.predicted_seconds": 0.5,
        "quire.planning_seconds": 0.25,
        "quire.guessing_seconds": 0.125,
        "quire.waiting_seconds": 0.5,
        "quire.running_seconds": 0.75,
        "quire.finishing_seconds": 0.0625,
    }


def test_a_step_that_copied_blocks_to_host_memory_says_how_long() -> None:
    collected = CollectedSpans()
    StepSpans(collected.tracer).add(replace(RECORD, copying=0.375), lambda _: None)
    (span,) = collected.ended()
    assert (span.attributes or {})["quire.copying_seconds"] == 0.375


async def test_a_step_and_the_traced_requests_in_it_link_to_each_other() -> None:
    async with served(InstantRunner(), record_steps=lambda: True) as worker, worker.router() as router:
        # a step takes 16 tokens
        await router.send(submit(1, list(range(20)), 5, traceparent=TRACED, request_id="r1"))
        await router.until_finished(1)
        await router.send(submit(2, [1, 2, 3], 2))
        await router.until_finished(2)
        await worker.until(lambda: len(steps_of(worker)) == 8)
        assert steps_of(worker) == [(0, 16), (0, 4), (1, 0), (1, 0), (1, 0), (1, 0), (0, 3), (1, 0)]
        sequence = worker.collected.named("sequence")
        steps = [span for span in worker.collected.ended() if span.name == "step"]
        with_links = [span for span in steps if span.links]
        assert len(with_links) == 6
        for span in with_links:
            (link,) = span.links
            assert link.context == sequence.context
            assert dict(link.attributes or {}) == {"quire.request_id": "r1"}
        assert [link.context for link in sequence.links] == [span.context for span in with_links]
        traces = {span.context.trace_id for span in steps}
        assert len(traces) == len(steps)
        assert sequence.context.trace_id not in traces


async def test_only_chosen_steps_have_a_span() -> None:
    chosen = iter([False, True, False, False, True, False])
    async with served(InstantRunner(), record_steps=lambda: next(chosen)) as worker, worker.router() as router:
        await router.send(submit(1, list(range(20)), 5, traceparent=TRACED))
        await router.until_finished(1)
        assert steps_of(worker) == [(0, 4), (1, 0)]


async def test_without_the_option_no_step_is_recorded() -> None:
    async with served(InstantRunner()) as worker, worker.router() as router:
        await router.send(submit(1, [1, 2, 3], 4, traceparent=TRACED))
        await router.until_finished(1)
        assert steps_of(worker) == []
        assert worker.collected.named("sequence").links == []


async def test_a_step_of_sequences_that_are_gone_has_a_span_without_links() -> None:
    async with served(InstantRunner()) as worker:
        worker.servicer.deliver(EngineOutputs(step=9, steps=(RECORD,)))
        await worker.until(lambda: len(steps_of(worker)) == 1)
        assert worker.collected.named("step").links == []


@pytest.mark.parametrize("more", [0, 2])
def test_a_long_sequence_keeps_the_links_to_its_newest_steps(more: int) -> None:
    collected = CollectedSpans()
    spans = SequenceSpans(collected.tracer, context_from(TRACED), {"quire.request_id": "r1"})
    for number in range(1, MAX_SPAN_ITEMS + more + 1):
        spans.stepped(SpanContext(number, number, is_remote=False), number)
    spans.refused(Cancelled("over"))
    sequence = collected.named("sequence")
    assert len(sequence.links) == MAX_SPAN_ITEMS
    assert (sequence.links[0].context.trace_id, sequence.dropped_links) == (1 + more, more)
