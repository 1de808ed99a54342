"""What a request leaves behind: spans and metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from common.contracts.types import DecisionKind, FinishReason
from common.process.logs import fields_of
from common.process.metrics import exposed
from router.contracts.events import Admitted
from router.contracts.session_ids import session_name
from router.observe.tail_rules import Objective
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import (
    CLOCK,
    MODEL,
    frontend_over,
    in_background,
    request,
)
from tests.support.spans import called

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
TIMES = (
    "quire:time_to_first_token_seconds",
    "quire:inter_token_latency_seconds",
    "quire:request_queue_time_seconds",
    "quire:e2e_request_latency_seconds",
)


async def test_a_request_makes_a_span_with_all_that_the_router_does_in_it() -> None:
    """The request begins when it came, and not when it was read."""
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        events = await harness.events(replace(request(request_id="r1"), arrived=CLOCK.monotonic() - 2.0))
        spans = {called(span): span for span in harness.spans.ended()}
        assert set(spans) == {"inference", "reading", "queue", "lookup", "stream"}
        reading, queue = spans["reading"], spans["queue"]
        assert reading.start_time == spans["inference"].start_time
        assert reading.end_time == queue.start_time
        assert reading.end_time - reading.start_time == pytest.approx(2e9, rel=0.5)
        whole = spans["inference"]
        assert whole.attributes is not None
        assert whole.attributes["quire.request_id"] == "r1"
        parents = {name: span.parent.span_id for name, span in spans.items() if span.parent is not None}
        within = whole.context.span_id
        assert parents == {
            "reading": within,
            "queue": within,
            "lookup": spans["queue"].context.span_id,
            "stream": within,
        }
        assert isinstance(events[0], Admitted)
        assert f"{whole.context.trace_id:032x}" == events[0].trace_id
        assert whole.name == f"text_completion {MODEL}"
        assert (spans["stream"].kind, spans["lookup"].kind) == (SpanKind.CLIENT, SpanKind.CLIENT)
        assert [event.name for event in spans["queue"].events] == ["decision"]
        assert [event.name for event in spans["stream"].events] == ["first token", "finished"]


async def test_the_spans_of_a_request_have_the_trace_state_of_its_client() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request(traceparent=parent, tracestate="vendor=a:1"))
        assert all(b"vendor=a:1" in span.encoded() for span in harness.spans.ended())
        assert harness.span("inference").context.trace_state.to_header() == "vendor=a:1"
        assert worker.submits[0].tracestate == "vendor=a:1"


async def test_the_trace_goes_on_from_the_clients_and_into_the_workers() -> None:
    worker = FakeWorker(automatic=True)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with frontend_over(worker) as harness:
        await harness.events(request(traceparent=parent))
        whole = next(span for span in harness.spans.ended() if called(span) == "inference")
        assert whole.parent is not None
        assert whole.parent.span_id == 0xB7AD6B7169203331
        call = harness.span("stream")
        assert call.parent == whole.context
        expected = f"00-0af7651916cd43dd8448eb211c80319c-{call.context.span_id:016x}-01"
        assert worker.submits[0].traceparent == expected


async def test_an_unsampled_request_costs_no_span() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"))
        assert harness.spans.ended() == ()
        assert worker.submits[0].traceparent == ""


async def test_a_cancelled_request_ends_its_span_as_an_error() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        async with in_background(harness, request()):
            await worker.until(lambda: bool(worker.submits))
        whole = next(span for span in harness.spans.ended() if called(span) == "inference")
        assert (whole.status.is_ok, whole.status.description) == (False, "the client went away")
        assert whole.attributes["error.type"] == harness.span("stream").attributes["error.type"] == "CANCELLED"


async def test_metrics_count_what_the_client_saw() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request(prompt=10, n=2))
        value = harness.registry.get_sample_value
        assert value("quire:requests_total") == 1
        assert value("quire:prompt_tokens_total") == 10
        assert value("quire:generation_tokens_total") == 6
        assert value("quire:request_success_total", {"finished_reason": "length"}) == 2
        assert value("quire:time_to_first_token_seconds_count") == 2
        assert value("quire:inter_token_latency_seconds_count") == 4
        assert (value("quire:num_requests_running"), value("quire:num_requests_waiting")) == (0, 0)


async def test_each_token_of_a_whole_answer_has_its_gap() -> None:
    """Its worker gathers tokens, so that three of them may come at once."""
    worker = FakeWorker()
    asked = replace(request(request_id="r1", max_tokens=4), whole=True)
    async with frontend_over(worker) as harness, in_background(harness, asked) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [5]}, admitted={1: 0})
        worker.step({1: [6, 7, 8]}, finished={1: FinishReason.LENGTH})
        await task
        value = harness.registry.get_sample_value
        assert value("quire:inter_token_latency_seconds_count") == 3
        (end,) = harness.decisions.find("r1", "outcome")
        assert "gaps" not in dict(end.figures), "no client waited for one of them"


async def test_every_reason_is_counted_from_zero() -> None:
    async with frontend_over(FakeWorker()) as harness:
        value = harness.registry.get_sample_value
        assert value("quire:request_failure_total", {"reason": "OVERLOADED"}) == 0
        assert value("quire:request_success_total", {"finished_reason": "length"}) == 0


async def test_times_of_a_traced_request_point_at_its_trace() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        (admitted, *_) = await harness.events(request(prompt=10))
        assert isinstance(admitted, Admitted)
        for name in TIMES:
            assert exemplars_of(harness.registry, name) == [{"trace_id": admitted.trace_id}], name


async def test_times_of_a_kept_request_point_at_the_trace_that_is_built() -> None:
    """Its bars count it once, and the exemplar of gaps is its longest one."""
    async with frontend_over(FakeWorker(automatic=True), objective=Objective(ttft=1e-9)) as harness:
        await harness.events(request(request_id="r1", traceparent=UNSAMPLED))
        await harness.until(lambda: bool(exemplars_of(harness.registry, TIMES[0])))
        for name in TIMES:
            assert exemplars_of(harness.registry, name) == [{"trace_id": UNSAMPLED[3:35]}], name
            assert harness.registry.get_sample_value(f"{name}_count") == (2 if "inter" in name else 1)
        (end,) = harness.decisions.find("r1", "outcome")
        figures = dict(end.figures)
        assert "kept: slow" in end.reasons
        assert figures["gaps"] == 2
        (gap,) = values_of(harness.registry, "quire:inter_token_latency_seconds")
        assert gap == pytest.approx(figures["longest_gap"])


async def test_an_ordinary_untraced_request_is_no_exemplar() -> None:
    async with frontend_over(FakeWorker(automatic=True), objective=Objective()) as harness:
        await harness.events(request(traceparent=UNSAMPLED))
        assert [exemplars_of(harness.registry, name) for name in TIMES] == [[]] * len(TIMES)


async def test_exemplars_are_for_those_who_ask_for_openmetrics() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        (admitted, *_) = await harness.events(request())
        assert isinstance(admitted, Admitted)
        for accept, there in (("application/openmetrics-text", True), ("text/plain", False), ("*/*", False)):
            assert (admitted.trace_id in exposed(harness.registry, accept)[1].decode()) is there, accept


async def test_times_of_an_untraced_request_point_nowhere() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        await harness.events(request(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"))
        assert exemplars_of(harness.registry, "quire:time_to_first_token_seconds") == []


def exemplars_of(registry: CollectorRegistry, name: str) -> list[dict[str, str]]:
    """Return the labels of the exemplars that OpenMetrics has of a histogram."""
    return [dict(exemplar.labels) for exemplar in _exemplars(registry, name)]


def values_of(registry: CollectorRegistry, name: str) -> list[float]:
    return [exemplar.value for exemplar in _exemplars(registry, name)]


def _exemplars(registry: CollectorRegistry, name: str) -> list[Exemplar]:
    _, text = exposed(registry, "application/openmetrics-text")
    families = text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    samples = [sample for family in families if family.name == name for sample in family.samples]
    return [sample.exemplar for sample in samples if sample.exemplar is not None]


async def test_the_lengths_of_what_ended_are_logged_for_who_chooses_a_block_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("DEBUG", logger="router.observe.recorder"):
        async with frontend_over(FakeWorker(automatic=True)) as harness:
            await harness.events(request(prompt=10, request_id="r1"))
    (line,) = caplog.records
    said = fields_of(line)
    assert (said["request_id"], said["prompt_tokens"], said["output_tokens"]) == ("r1", 10, 3)
    assert said["cached_tokens"] == 0


async def test_records_and_spans_have_the_name_of_the_session() -> None:
    """They have it where a request enters and where it ends; what the client calls its session is nowhere."""
    name = session_name("", "anna@example.org")
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        await harness.events(request(request_id="r1", session=name))
        found = {each.kind: each.session for each in harness.decisions.find()}
        assert (found[DecisionKind.ADMISSION], found[DecisionKind.OUTCOME]) == (name, name)
        (whole,) = [each for each in harness.spans.ended() if called(each) == "inference"]
        assert whole.attributes is not None
        assert whole.attributes["gen_ai.conversation.id"] == name
