"""A collector of the operator, over gRPC or HTTP: what it gets of a suite, the service graph in it, `quire trace`."""

from __future__ import annotations

import asyncio
import gzip
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2
from tests.support.suite import PATIENCE, Suite, running_suite
from tests.support.waiting import until

MODEL = CHECKPOINT.name
SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT
# The spans of one request over HTTP with one sequence and one chunk: as many as before each call was a pair.
WANTED = Counter(
    [
        "POST /v1/chat/completions",
        f"chat {MODEL}",
        *("reading", "queue", "lookup", "stream"),
        *("sequence", "reserve", "prefill chunk", "decode"),
        "kvmanager.reserve",
    ]
)


class Received(NamedTuple):
    service: str
    span: Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans, over gRPC and over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.environment: dict[str, str] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Received(named["service.name"], span) for span in scope.spans]

    def of(self, trace_id: str) -> list[Received]:
        return [each for each in self.spans if each.span.trace_id.hex() == trace_id]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one POST, as `http/protobuf` has it."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        assert (head.split()[1], headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        whole = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        self.take(trace_service_pb2.ExportTraceServiceRequest.FromString(whole))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def collecting(protocol: str) -> AsyncIterator[Collector]:
    """Serve a collector; `environment` names it to a process."""
    found = Collector()
    if protocol == "grpc":
        rpc = aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, rpc)
        port = rpc.add_insecure_port("127.0.0.1:0")
        await rpc.start()
    else:
        http = await asyncio.start_server(found.serve, "127.0.0.1", 0)
        port = http.sockets[0].getsockname()[1]
        found.environment["OTEL_EXPORTER_OTLP_COMPRESSION"] = "gzip"
    found.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
    found.environment["OTEL_EXPORTER_OTLP_PROTOCOL"] = protocol
    try:
        yield found
    finally:
        if protocol == "grpc":
            await rpc.stop(0)
        else:
            http.close()


def edges_of(found: Iterable[Received]) -> set[tuple[str, str, str, str]]:
    """Return the edges of a service graph: each server's span with the client's span above it."""
    spans = {each.span.span_id: each for each in found}
    pairs = [
        (spans[each.span.parent_span_id], each)
        for each in spans.values()
        if each.span.kind == SERVER and each.span.parent_span_id in spans
    ]
    assert all(client.span.kind == CLIENT for client, _ in pairs)
    return {(client.service, client.span.name, server.service, server.span.name) for client, server in pairs}


async def trace_of(suite: Suite, trace_id: str) -> Counter[str]:
    """Return the names of the spans that `quire trace` shows, once all have come."""

    async def names() -> Counter[str]:
        request = decision_pb2.GetTraceRequest(trace_id=trace_id)
        try:
            found = await suite.decisions.GetTrace(request, timeout=PATIENCE)
        except aio.AioRpcError:
            return Counter()
        return Counter([span.name for span in found.spans])

    return await until(names, lambda found: found >= WANTED)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_draws_the_edges_between_services_and_quire_trace_has_the_same_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    async with collecting(protocol) as collector:
        with monkeypatch.context() as environment:
            for name, value in collector.environment.items():
                environment.setenv(name, value)
            options = StackOptions(model=CHECKPOINT, worker_flags=("--kv-blocks", "256", "--simulate", "base=2ms"))
            async with running_suite(tmp_path, options) as suite:
                trace_id = secrets.token_hex(16)
                sent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "tracestate": "vendor=a:1"}
                words = " ".join(str(number) for number in range(40))  # some blocks, so that Redis is asked
                body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4}
                async with httpx.AsyncClient(base_url=suite.stack.http_url, timeout=PATIENCE) as client:
                    answer = await client.post("/v1/chat/completions", json=body, headers=sent)
                assert answer.status_code == 200
                found = await until(lambda: collector.of(trace_id), lambda spans: len(spans) >= WANTED.total())
                assert Counter([each.span.name for each in found]) == WANTED
                assert await trace_of(suite, trace_id) == WANTED
    assert edges_of(found) == {
        ("quire-router", "stream", "quire-gpuworker", "sequence"),
        ("quire-gpuworker", "reserve", "quire-kvmanager", "kvmanager.reserve"),
    }
    assert {each.span.trace_state for each in found} == {"vendor=a:1"}
    named = {each.span.name: each.span for each in found}
    called = {pair.key: pair.value for pair in named[f"chat {MODEL}"].attributes}
    assert called["gen_ai.response.id"].string_value == answer.json()["id"]
    assert named["lookup"].kind == CLIENT
    asked = named["POST /v1/chat/completions"]
    assert (asked.kind, asked.parent_span_id.hex()) == (SERVER, "b7ad6b7169203331")
    assert named[f"chat {MODEL}"].parent_span_id == asked.span_id
