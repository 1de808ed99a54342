"""Spans in the router's ring: from its own tracer and over OTLP, found by trace or request; the decision RPCs."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc import aio
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, StatusCode, Tracer

from bench.lib.decision_records import records_of
from common.contracts.errors import NotFound
from common.contracts.types import Decision, DecisionKind
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from common.telemetry.decisions import add_decision
from common.telemetry.delivery import otlp_request
from common.telemetry.spans import Origin, RecordedSpan, SpanTracer
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.observe.otlp_receiver import add_otlp_receiver, sender_of
from router.observe.siblings import Siblings
from router.observe.trace_codec import KeptSpan, from_otlp, from_own
from router.observe.trace_store import TraceStore
from tests.support.spans import tracer_to


def provider(service: str = "quire-router") -> TracerProvider:
    return TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)


@pytest.fixture
def store() -> TraceStore:
    return TraceStore(4)


def own_tracer(store: TraceStore) -> SpanTracer:
    return tracer_to(store.add_own, "quire-router")


@pytest.fixture
def tracer(store: TraceStore) -> SpanTracer:
    return own_tracer(store)


def span(tracer: Tracer, name: str, request_id: str = "") -> str:
    """Record one root span; return its trace id."""
    with tracer.start_as_current_span(name, attributes={"quire.request_id": request_id} if request_id else {}) as made:
        return f"{made.get_span_context().trace_id:032x}"


def test_a_span_keeps_everything(store: TraceStore, tracer: Tracer) -> None:
    with tracer.start_as_current_span("other") as other:
        linked = other.get_span_context()
    root = tracer.start_span("request", start_time=1_000, attributes={"quire.request_id": "r1", "n": 2, "ok": True})
    child = tracer.start_span("queue", trace.set_span_in_context(root), links=[Link(linked)], start_time=1_100)
    child.add_event("decision", {"quire.decision.reasons": ["a", "b"], "cost": 0.5}, timestamp=1_150)
    child.set_status(StatusCode.ERROR, "deadline")
    child.end(1_200)
    root.end(2_000)
    found = store.trace(request_id="r1")
    root_id, child_id = (f"{each.get_span_context().span_id:016x}" for each in (root, child))
    assert found == pb.GetTraceResponse(
        trace_id=f"{root.get_span_context().trace_id:032x}",
        spans=[
            pb.Span(
                span_id=root_id, service="quire-router", name="request", start_unix_nano=1_000, end_unix_nano=2_000,
                status="unset", attributes={"quire.request_id": "r1", "n": "2", "ok": "true"},
            ),
            pb.Span(
                span_id=child_id, parent_span_id=root_id, service="quire-router", name="queue", start_unix_nano=1_100,
                end_unix_nano=1_200, status="error", status_message="deadline",
                events=[
                    pb.SpanEvent(
                        name="decision", time_unix_nano=1_150,
                        attributes={"quire.decision.reasons": '["a", "b"]', "cost": "0.5"},
                    ),
                ],
                links=[f"{linked.trace_id:032x}:{linked.span_id:016x}"],
            ),
        ],
    )  # fmt: skip


class Counted:
    """A span that counts how often it is asked for its request."""

    asked = 0
    size = 100
    tenant = correlation_id = ""

    def __init__(self, number: int) -> None:
        self.trace_id, self.span_id = "one", str(number)
        self._request = f"r{number // 2}"

    @property
    def request_id(self) -> str:
        Counted.asked += 1
        return self._request


def test_pushing_a_span_out_costs_the_same_however_large_its_trace_is() -> None:
    store: Any = TraceStore(1_000)
    store.add_span(map(Counted, range(2_000)))
    assert Counted.asked < 10_000
    assert [store.trace_of(f"r{number}") for number in (499, 500, 999)] == ["", "one", "one"]


def test_a_request_of_a_tenant_is_found_although_another_one_used_its_id_later() -> None:
    store = TraceStore(2)
    tracer = own_tracer(store)
    ids = []
    for tenant in ("red", "blue"):
        attributes = {"quire.request_id": "r1", "quire.tenant": tenant}
        with tracer.start_as_current_span("request", attributes=attributes) as made:
            ids.append(f"{made.get_span_context().trace_id:032x}")
    assert [store.trace_of("r1", tenant) for tenant in ("red", "blue", "", "green")] == [*ids, ids[1], ""]
    span(tracer, "newer")
    assert [store.trace_of("r1", tenant) for tenant in ("red", "blue", "")] == ["", ids[1], ids[1]]


def test_a_correlation_id_finds_the_newest_of_its_requests() -> None:
    store = TraceStore(8)
    tracer = own_tracer(store)
    traces = []
    for request, correlation in (("quire-1", "c"), ("quire-2", "c")):
        attributes = {"quire.request_id": request, "quire.correlation_id": correlation}
        with tracer.start_as_current_span("request", attributes=attributes) as made:
            traces.append(f"{made.get_span_context().trace_id:032x}")
    assert [store.trace_of(name) for name in ("c", "quire-1", "quire-2")] == [traces[1], *traces]


def test_both_ways_into_the_store_give_the_same_span(store: TraceStore) -> None:
    ended: list[RecordedSpan] = []
    own = tracer_to(ended.append, "quire-router")
    link = Link(own.start_span("other").get_span_context())
    attributes: dict[str, Any] = {
        "bytes": b"\x01\xff",
        "quire.request_id": "r1",
        "text": "é",
        "whole": 1,
        "half": 0.5,
        "no": False,
        "list": ["a", "b"],
        "numbers": [1, 2],
    }
    made = own.start_span("root", links=[link], attributes=attributes)
    made.add_event("event", attributes)
    made.set_status(StatusCode.ERROR, "why")
    made.end()
    (delivered,) = from_otlp(otlp_request(ended))
    direct = from_own(*ended)
    assert direct.message() == delivered.message()
    assert direct._replace(message=delivered.message, size=delivered.size) == delivered
    assert direct.request_id == "r1"


def test_the_bound_of_the_store_counts_what_spans_and_their_decisions_take() -> None:
    store, count = TraceStore(10_000, 1 << 30), 100
    tracer = own_tracer(store)
    store.add_own(RecordedSpan("warm", SpanContext(1, 1, is_remote=False), None, Origin(Resource({})), 0, print))
    before = store.bytes
    tracemalloc.start()
    try:
        for decision in records_of(count):
            names = {f"quire.{number}": f"{decision.decision_id}-{number}" for number in range(10)}
            span = tracer.start_span("request", attributes=names)
            add_decision(span, decision)
            span.end()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 < (store.bytes - before) / taken < 2.5


VALUES: dict[str, Callable[[int], Any]] = {
    "texts": lambda number: [f"{number}-{each}" + "x" * 1000 for each in range(16)],
    "bytes": lambda number: number.to_bytes(8) * 2000,
    "numbers": lambda number: [float(number + each) for each in range(500)],
    "nested": lambda number: [[f"{number}-{each}" * 100 for each in range(4)] for _ in range(4)],
    "integers": lambda number: (1 << 80_000) + number,
}


@pytest.mark.parametrize("kind", VALUES)
def test_the_bound_of_the_store_counts_values_of_every_type(kind: str) -> None:
    store, count = TraceStore(10_000, 1 << 30), 200
    tracer = own_tracer(store)
    tracer.start_span("warm").end()
    before = store.bytes
    tracemalloc.start()
    try:
        for number in range(count):
            span = tracer.start_span("request", attributes={"value": VALUES[kind](number)})
            span.add_event("event", {"value": VALUES[kind](number)})
            span.add_link(SpanContext(1, 1, is_remote=False), {"value": VALUES[kind](number)})
            span.end()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 < (store.bytes - before) / taken < 2.5


def test_the_oldest_span_goes_first(store: TraceStore, tracer: Tracer) -> None:
    ids = [span(tracer, f"s{number}", f"r{number}") for number in range(6)]
    assert len(store) == 4
    with pytest.raises(NotFound, match=f"no span of trace {ids[1]}"):
        store.trace(ids[1])
    with pytest.raises(NotFound, match=r"no span of request r1; .* newer spans took its place \(room for 4 spans"):
        store.trace(request_id="r1")
    assert [each.name for each in store.trace(request_id="r2").spans] == ["s2"]


def test_a_request_is_found_while_any_span_names_it(store: TraceStore, tracer: Tracer) -> None:
    with tracer.start_as_current_span("root", attributes={"quire.request_id": "r1"}):
        span(tracer, "first", "r1")
    span(tracer, "filler")
    span(tracer, "filler")
    span(tracer, "filler")  # pushes out "first", whose trace lives on in "root"
    assert [each.name for each in store.trace(request_id="r1").spans] == ["root"]
    span(tracer, "filler")
    with pytest.raises(NotFound):
        store.trace(request_id="r1")


def kept(span_id: str, request_id: str = "") -> KeptSpan:
    return KeptSpan("t1", span_id, request_id, pb.Span)


def test_a_span_that_is_sent_again_under_another_request_leaves_no_name_behind(store: TraceStore) -> None:
    for number in range(1_000):
        store.add_span((kept("s1", f"r{number}"),), "worker")
    assert (len(store), store.names) == (1, 1)
    assert (store.trace_of("r998"), store.trace_of("r999")) == ("", "t1")


def test_a_span_that_another_sender_has_too_stays_as_it_came_and_is_not_refused(store: TraceStore) -> None:
    assert store.add_span((kept("1" * 16, "r1"),)) == 0
    assert store.add_span((kept("1" * 16, "r2"), kept("2" * 16)), "collector") == 0
    assert (len(store), store.trace_of("r1"), store.trace_of("r2")) == (2, kept("1" * 16).trace_id, "")


def test_a_trace_that_goes_on_for_ever_forgets_the_senders_of_the_spans_that_left(store: TraceStore) -> None:
    for number in range(1_000):
        store.add_span((kept(f"s{number}"),), f"worker-{number}")
    assert store.senders("t1") == 4


def test_a_ring_needs_room() -> None:
    with pytest.raises(ValueError, match="capacity is 0 and max_bytes is 1; expected 1 or more"):
        TraceStore(0, 1)


@pytest.mark.parametrize(
    ("names", "sender"),
    [
        ({"x509_subject_alternative_name": [b"a@b", b"w.quire"], "peer_dns": [b"w.quire"]}, "w.quire"),
        ({"x509_subject_alternative_name": [b"a@b"], "x509_common_name": [b"worker"]}, "worker"),
        ({}, "ipv4:10.0.0.7"),
    ],
)
def test_a_sender_is_the_host_in_its_certificate(names: dict[str, list[bytes]], sender: str) -> None:
    context = Mock(auth_context=lambda: names, peer=lambda: "ipv4:10.0.0.7:4711")
    assert sender_of(context) == sender


@dataclass(frozen=True)
class Served:
    """A server with the store behind it, as the router has it."""

    address: str
    store: TraceStore
    ring: DecisionRing
    decisions: rpc.DecisionServiceStub


@pytest.fixture
async def served(store: TraceStore) -> AsyncIterator[Served]:
    server, ring = RpcServer(["quire.decision.v1.DecisionService"]), DecisionRing(8)
    add_otlp_receiver(store, server.server)
    rpc.add_DecisionServiceServicer_to_server(DecisionServicer(RecordSources(ring, store), Siblings()), server.server)
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield Served(f"127.0.0.1:{port}", store, ring, rpc.DecisionServiceStub(channel))
    await server.stop(0)


async def test_spans_of_another_service_arrive_over_otlp(served: Served) -> None:
    def export() -> str:
        made = provider("quire-gpuworker")
        exporter = OTLPSpanExporter(f"http://{served.address}", insecure=True)
        made.add_span_processor(SimpleSpanProcessor(exporter))
        trace_id = span(made.get_tracer("test"), "prefill", "r7")
        made.shutdown()
        return trace_id

    trace_id = await asyncio.to_thread(export)
    found = await served.decisions.GetTrace(pb.GetTraceRequest(trace_id=trace_id.upper()))
    assert [(each.service, each.name) for each in found.spans] == [("quire-gpuworker", "prefill")]
    assert found == await served.decisions.GetTrace(pb.GetTraceRequest(request_id="r7"))


async def test_a_span_that_is_sent_twice_is_kept_once(served: Served) -> None:
    made = provider()
    ended = made.get_tracer("test").start_span("once")
    ended.end()

    def export() -> None:
        exporter = OTLPSpanExporter(f"http://{served.address}", insecure=True)
        exporter.export([ended])  # type: ignore[list-item]
        exporter.export([ended])  # type: ignore[list-item]
        exporter.shutdown()

    await asyncio.to_thread(export)
    assert len(served.store) == 1


async def test_an_unknown_trace_is_not_found(served: Served) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await served.decisions.GetTrace(pb.GetTraceRequest(request_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_trace_must_be_named(served: Served) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await served.decisions.GetTrace(pb.GetTraceRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "id: is missing; expected trace_id or request_id"


async def test_decisions_are_listed(served: Served) -> None:
    for number, request_id in enumerate(["a", "b", "a"]):
        served.ring.record(Decision(f"d{number}", DecisionKind.ROUTING, number, "worker-0", request_id))
    answer = await served.decisions.ListDecisions(pb.ListDecisionsRequest(request_id="a", kind="routing", limit=1))
    assert [each.decision_id for each in answer.decisions] == ["d2"]
