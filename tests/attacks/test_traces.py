"""Attacks on traces and decisions: forged spans, floods of spans, reading what others did."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.trace.v1 import trace_pb2

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc
from quire.inference.v1 import inference_pb2
from tests.support.spans import called
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
SPAN_RING = 20_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """A suite with one worker that runs no model."""
    options = StackOptions(model=CHECKPOINT, worker_flags=("--simulate", "base=1ms", "--kv-blocks", "256"))
    async with running_suite(tmp_path_factory.mktemp("traces"), options) as running:
        yield running


async def served(suite: Suite, traceparent: str = "") -> inference_pb2.Admitted:
    """Let an innocent request run to its end."""
    request = greedy([1, 2, 3, 4], 4)
    request.traceparent = traceparent
    outcome = await suite.generate(request)
    assert outcome.admitted is not None
    return outcome.admitted


def forged(trace_id: str, count: int = 1, text: str = "") -> ExportTraceServiceRequest:
    """Return spans that claim to be a worker's, in this trace or, without an id, in one of their own each."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "quire-gpuworker"
    scope = resource.scope_spans.add()
    for _ in range(count):
        ids = bytes.fromhex(trace_id) or secrets.token_bytes(16)
        span = trace_pb2.Span(trace_id=ids, span_id=secrets.token_bytes(8), name="forged", start_time_unix_nano=1)
        span.attributes.add(key="text").value.string_value = text
        scope.spans.append(span)
    return message


async def names(suite: Suite, trace_id: str, wanted: set[str]) -> set[str]:
    """Return the names of a trace's spans once these have arrived, as an operator sees them."""
    found: set[str] = set()
    async with asyncio.timeout(PATIENCE):
        while not wanted <= found:
            found = await names_now(suite, trace_id)
            await asyncio.sleep(0.02)
    return found


async def names_now(suite: Suite, trace_id: str) -> set[str]:
    answer = await suite.decisions.GetTrace(pb.GetTraceRequest(trace_id=trace_id), timeout=PATIENCE)
    return {called(span) for span in answer.spans}


async def test_a_stranger_puts_no_span_into_a_trace(suite: Suite) -> None:
    victim = await served(suite)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await TraceServiceStub(suite.channel).Export(forged(victim.trace_id), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "forged" not in await names(suite, victim.trace_id, {"inference", "stream"})


async def test_a_stranger_lists_nothing(suite: Suite) -> None:
    victim = await served(suite)
    public = decision_pb2_grpc.DecisionServiceStub(suite.channel)
    for call in (
        public.ListDecisions(pb.ListDecisionsRequest(), timeout=PATIENCE),
        public.ListDecisions(pb.ListDecisionsRequest(kind="routing"), timeout=PATIENCE),
        public.GetTrace(pb.GetTraceRequest(trace_id=victim.trace_id), timeout=PATIENCE),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in (refused.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await public.WatchDecisions(pb.WatchDecisionsRequest(), timeout=PATIENCE).read()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        assert (await client.get(f"{suite.stack.http_url}/metrics")).status_code == 404
    status = await suite.inference.GetStatus(inference_pb2.GetStatusRequest(), timeout=PATIENCE)
    assert [(worker.worker_id, worker.address) for worker in status.workers] == [("worker-0", "")]


async def test_who_sends_the_trace_id_of_another_sees_its_own_request_alone(suite: Suite) -> None:
    victim = await served(suite)
    await names(suite, victim.trace_id, {"inference", "stream"})
    attacker = await served(suite, f"00-{victim.trace_id}-{secrets.token_hex(8)}-01")
    assert attacker.trace_id == victim.trace_id
    public = decision_pb2_grpc.DecisionServiceStub(suite.channel)
    for mine in (attacker.request_id, victim.request_id):
        await own_request(public, mine)


async def own_request(public: decision_pb2_grpc.DecisionServiceStub, request_id: str) -> None:
    """Check that a client who names its request gets this request alone."""
    spans: list[pb.Span] = []
    async with asyncio.timeout(PATIENCE):
        while "stream" not in {span.name for span in spans}:
            answer = await public.GetTrace(pb.GetTraceRequest(request_id=request_id), timeout=PATIENCE)
            spans = list(answer.spans)
            await asyncio.sleep(0.02)
    assert {span.attributes["quire.request_id"] for span in spans} - {""} == {request_id}
    assert [called(span) for span in spans].count("inference") == 1
    records = await public.ListDecisions(pb.ListDecisionsRequest(request_id=request_id), timeout=PATIENCE)
    assert {record.request_id for record in records.decisions} == {request_id}


async def test_a_service_that_floods_pushes_out_its_own_spans(suite: Suite) -> None:
    victim = await served(suite)
    await names(suite, victim.trace_id, {"inference", "stream"})
    peer, sent = TraceServiceStub(suite.admin), 0
    while sent < SPAN_RING + 5_000:
        await peer.Export(forged("", 2_500), timeout=PATIENCE)
        sent += 2_500
    assert {"inference", "queue", "stream"} <= await names_now(suite, victim.trace_id)


async def test_spans_of_a_megabyte_take_bounded_memory(suite: Suite) -> None:
    victim = await served(suite)
    router = suite.stack.children["router"].pid
    peer, text = TraceServiceStub(suite.admin), "x" * MIB
    await peer.Export(forged("", 4, text), timeout=PATIENCE)
    before = psutil.Process(router).memory_info().rss
    for _ in range(75):
        await peer.Export(forged("", 4, text), timeout=PATIENCE)
    grown = (psutil.Process(router).memory_info().rss - before) / MIB
    assert grown < 120.0, f"the router has grown by {grown:.0f} MiB"
    assert {"inference", "stream"} <= await names_now(suite, victim.trace_id)


async def test_one_trace_takes_no_more_than_its_part(suite: Suite) -> None:
    """Spans forged into one trace are refused beyond its bound, and the router's own still find room in it."""
    trace_id = secrets.token_hex(16)
    peer = TraceServiceStub(suite.admin)
    answers = [await peer.Export(forged(trace_id, 2_000), timeout=PATIENCE) for _ in range(2)]
    assert [answer.partial_success.rejected_spans for answer in answers] == [0, 2_000]
    await served(suite, f"00-{trace_id}-{secrets.token_hex(8)}-01")
    assert {"forged", "inference", "stream"} <= await names(suite, trace_id, {"inference", "stream"})
