"""Spans of a process: which are kept, where they go, and that a missing receiver neither hangs nor shouts."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from common.rpc.server import RpcServer
from common.settings.options import ServiceSettings
from common.telemetry import context_from
from common.telemetry.provider import setup
from common.telemetry.spans import RecordedSpan
from common.version import quire_version

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DEADLINE_S = 120.0


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP receiver that remembers (service, span) names."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.address = ""

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.received.put_nowait((named["service.name"], span.name))
        return trace_service_pb2.ExportTraceServiceResponse()

    async def next(self) -> tuple[str, str]:
        async with asyncio.timeout(DEADLINE_S):
            return await self.received.get()


@pytest.fixture
async def receivers() -> AsyncIterator[list[Receiver]]:
    servers, receivers = [RpcServer([]), RpcServer([])], [Receiver(), Receiver()]
    for server, receiver in zip(servers, receivers, strict=True):
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server.server)
        receiver.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    yield receivers
    for server in servers:
        await server.stop(0)


def kept(ratio: float, traceparent: str) -> int:
    """Return how many of one span are kept."""
    ended: list[RecordedSpan] = []
    telemetry = setup("test", ServiceSettings(trace_sample_ratio=ratio), ended.append, {})
    telemetry.tracer.start_span("span", context_from(traceparent)).end()
    return len(ended)


@pytest.mark.parametrize(
    ("ratio", "traceparent", "count"),
    [(1.0, "", 1), (0.0, "", 0), (0.0, SAMPLED, 1), (1.0, SAMPLED[:-1] + "0", 0)],
    ids=["all", "none", "the client wants it", "the client does not"],
)
def test_sampling_is_decided_at_the_head(ratio: float, traceparent: str, count: int) -> None:
    assert kept(ratio, traceparent) == count


async def test_spans_reach_the_trace_endpoint(receivers: list[Receiver]) -> None:
    telemetry = setup("kvmanager", ServiceSettings(trace_endpoint=receivers[0].address), environ={})
    telemetry.tracer.start_span("grant").end()
    assert await receivers[0].next() == ("quire-kvmanager", "grant")
    await telemetry.aclose()


@pytest.mark.parametrize("emitted", [False, True])
async def test_a_collector_of_the_usual_variable_gets_spans_besides(receivers: list[Receiver], emitted: bool) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receivers[1].address}"}
    telemetry = setup("gpuworker", ServiceSettings(trace_endpoint=receivers[0].address), environ=environ)
    if emitted:
        telemetry.emit(kept_spans(1))
    else:
        telemetry.tracer.start_span("span").end()
    await telemetry.aclose()
    expected = ("quire-test", "kept") if emitted else ("quire-gpuworker", "span")
    assert [await each.next() for each in receivers] == [expected] * 2
    assert all(each.received.empty() for each in receivers)


async def test_the_router_keeps_its_spans_beside_a_collector_and_sends_them_nowhere_else(
    receivers: list[Receiver],
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receivers[1].address}"}
    own: list[RecordedSpan] = []
    telemetry = setup("router", ServiceSettings(trace_endpoint=receivers[0].address), own.append, environ)
    telemetry.tracer.start_span("queue").end()
    assert [span.name for span in own] == ["queue"]
    assert await receivers[1].next() == ("quire-router", "queue")
    await telemetry.aclose()
    assert receivers[0].received.empty()


async def test_a_collector_that_does_not_answer_keeps_no_span_from_the_router(receivers: list[Receiver]) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    telemetry = setup("gpuworker", ServiceSettings(trace_endpoint=receivers[0].address), environ=environ)
    telemetry.tracer.start_span("decode").end()
    assert await receivers[0].next() == ("quire-gpuworker", "decode")
    await telemetry.aclose()


async def test_closing_delivers_what_still_waits(receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.telemetry.delivery.EXPORT_TIMEOUT_S", DEADLINE_S)
    telemetry = setup("gpuworker", ServiceSettings(trace_endpoint=receivers[0].address), environ={})
    for number in range(1500):
        telemetry.tracer.start_span(f"step {number}").end()
    await telemetry.aclose()
    assert receivers[0].received.qsize() == 1500


async def test_a_missing_receiver_is_logged_once_and_holds_no_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry = setup("gpuworker", ServiceSettings(trace_endpoint="127.0.0.1:1"), environ={})
    for number in range(2000):
        telemetry.tracer.start_span(f"step {number}").end()
    async with asyncio.timeout(DEADLINE_S):
        while not caplog.records:
            await asyncio.to_thread(telemetry.flush)
    # The exporter alone would try for a minute and more; a bound of its own ends it after two seconds.
    async with asyncio.timeout(60.0):
        await telemetry.aclose()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["spans cannot be delivered to http://127.0.0.1:1; they are dropped until it answers"]


@pytest.mark.parametrize(("value", "expected"), [("true", False), (" TRUE ", False), ("false", True), ("", True)])
def test_the_usual_variable_turns_spans_off(value: str, expected: bool) -> None:
    environ = {"OTEL_SDK_DISABLED": value, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    own: list[RecordedSpan] = []
    if expected:
        del environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    telemetry = setup("router", ServiceSettings(trace_sample_ratio=1.0), own.append, environ)
    assert telemetry.deliverers == ()
    span = telemetry.tracer.start_span("route", context_from(SAMPLED))
    step = telemetry.tracer.sampling(ALWAYS_ON).start_span("step")
    assert (span.is_recording(), step.is_recording()) == (expected, expected)
    # Services that are not turned off follow the parent that they get.
    assert span.get_span_context().trace_flags.sampled is expected
    span.end()
    step.end()
    telemetry.emit(kept_spans(1))
    assert len(own) == (3 if expected else 0)


def kept_spans(count: int) -> list[RecordedSpan]:
    ended: list[RecordedSpan] = []
    telemetry = setup("test", ServiceSettings(trace_sample_ratio=1.0), ended.append, {})
    for _ in range(count):
        telemetry.tracer.start_span("kept").end()
    return ended


async def test_a_span_that_cannot_be_written_loses_itself_alone(
    receivers: list[Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = setup("router", ServiceSettings(trace_endpoint=receivers[0].address), environ={})
    for number in range(4):
        telemetry.tracer.start_span("before the epoch", start_time=-1).end(5)
        telemetry.tracer.start_span(f"step {number}").end()
    await telemetry.aclose()
    assert [(await receivers[0].next())[1] for _ in range(4)] == [f"step {number}" for number in range(4)]
    said = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(said) == 1
    assert "before the epoch" in said[0]


async def test_without_a_receiver_nothing_is_started() -> None:
    telemetry = setup("router", ServiceSettings(), environ={})
    telemetry.tracer.start_span("route").end()
    await telemetry.aclose()


def named_by(instance: str = "") -> dict[str, str]:
    """Return what a process of the router says of itself with its spans."""
    spans: list[RecordedSpan] = []
    made = setup("router", ServiceSettings(), spans.append, {}, instance, sampler=ALWAYS_ON)
    made.tracer.start_span("a").end()
    resource = Resource.FromString(spans[0].origin.encoded)
    return {each.key: each.value.string_value for each in resource.attributes}


def test_a_process_says_which_one_it_is_and_of_which_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    found = named_by()
    assert found["service.name"] == "quire-router"
    assert found["service.instance.id"] == f"{socket.gethostname()}:{os.getpid()}"
    assert found["service.version"] == quire_version()
    assert named_by("worker-3")["service.instance.id"] == "worker-3"


def test_what_the_operator_names_comes_before_our_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=one,deployment.environment.name=test")
    found = named_by()
    wanted = {"service.name": "chat", "service.instance.id": "one", "deployment.environment.name": "test"}
    assert wanted.items() <= found.items()
    assert found["service.version"] == quire_version()
