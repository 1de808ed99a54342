"""The spans of one request at the router: calls of others are those of clients, and a kept trace hangs where it may."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from common.contracts.clock import SystemClock
from common.contracts.types import Decision, DecisionKind
from common.telemetry import context_from, span_context_of, traceparent_of
from router.contracts.events import ValidatedRequest
from router.contracts.index_answer import NOTHING_ASKED, IndexAnswer, IndexSaid
from router.observe.request_trace import RequestTrace
from tests.support.router.frontend_harness import request
from tests.support.spans import CollectedSpans

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROUTED = Decision("d-1", DecisionKind.ROUTING, 2_000, "worker-0", "r1")
REDIS = {"db.system.name": "redis", "peer.service": "redis"}


def traced(spans: CollectedSpans, asked: ValidatedRequest) -> RequestTrace:
    return RequestTrace(spans.tracer, SystemClock(), asked, "r1", "small")


LOOKUPS = {
    "answered": (IndexAnswer({"worker-0": 2}), SpanKind.CLIENT, REDIS),
    "cut": (IndexAnswer({}, IndexSaid.CUT, "2 ms"), SpanKind.CLIENT, REDIS),
    "late": (IndexAnswer(None, IndexSaid.LATE, "2 ms"), SpanKind.CLIENT, {**REDIS, "error.type": "late"}),
    "failed": (IndexAnswer(None, IndexSaid.FAILED, "refused"), SpanKind.CLIENT, {**REDIS, "error.type": "failed"}),
    "skipped": (IndexAnswer(None, IndexSaid.SKIPPED), SpanKind.INTERNAL, {}),
    "off": (IndexAnswer(None, IndexSaid.OFF), SpanKind.INTERNAL, {}),
    "short prompt": (NOTHING_ASKED, SpanKind.INTERNAL, {}),
}


@pytest.mark.parametrize("how", LOOKUPS)
def test_a_lookup_is_a_call_of_redis_where_redis_was_asked(how: str) -> None:
    index, kind, attributes = LOOKUPS[how]
    spans = CollectedSpans()
    traced(spans, request()).placed(ROUTED, 1_000, 2_000, index)
    lookup = spans.named("lookup")
    assert (lookup.kind, lookup.attributes) == (kind, attributes)
    assert (lookup.status.status_code is StatusCode.ERROR) == ("error.type" in attributes)


def test_the_worker_is_called_once_wherever_the_request_moves() -> None:
    spans = CollectedSpans()
    trace = traced(spans, request())
    assert trace.parent == ""
    trace.placed(ROUTED, 1_000, 2_000, NOTHING_ASKED)
    parent = trace.parent
    trace.lost()
    trace.placed(ROUTED, 3_000, 4_000, NOTHING_ASKED)
    trace.end("", "")
    stream = spans.named("stream")
    assert trace.parent == parent
    assert (span_context_of(parent).span_id, stream.kind) == (stream.context.span_id, SpanKind.CLIENT)
    assert stream.parent == spans.named("inference").context


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"chat": True}, "chat small"), ({}, "text_completion small"), ({"embeds": True}, "embeddings small")],
)
def test_the_inference_is_named_by_its_operation_and_model(fields: dict[str, bool], name: str) -> None:
    spans = CollectedSpans()
    traced(spans, request(**fields)).end("", "")
    assert spans.named("inference").name == name


@pytest.mark.parametrize("sent", [CLIENT, ""])
def test_a_kept_request_hangs_below_its_client_and_not_below_a_call_that_is_not_recorded(sent: str) -> None:
    spans = CollectedSpans(ALWAYS_OFF)
    with spans.tracer.start_as_current_span("POST /v1/completions", context_from(sent)) as call:
        trace = traced(spans, request(traceparent=traceparent_of()))
    head = trace.head(())
    assert head is not None
    assert head.trace_id == call.get_span_context().trace_id
    assert (head.parent.span_id if head.parent is not None else 0) == (0xB7AD6B7169203331 if sent else 0)
    assert head.name == "text_completion small"


def test_a_kept_request_that_failed_says_by_what() -> None:
    trace = traced(CollectedSpans(ALWAYS_OFF), request())
    trace.end("no worker is there", "UNAVAILABLE")
    head = trace.head(())
    assert head is not None
    assert head.attributes["error.type"] == "UNAVAILABLE"
