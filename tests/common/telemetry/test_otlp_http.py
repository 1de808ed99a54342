"""Spans over HTTP: what a collector gets, in both forms, and what of OpenTelemetry's variables is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from common.contracts.errors import InvalidConfig
from common.settings.options import ServiceSettings
from common.telemetry.otlp_http import collector_of
from common.telemetry.provider import setup
from tests.support.proxies import running_proxy

PATIENCE_S = 60.0
ROOT = "OTEL_EXPORTER_OTLP_"


class Collector:
    """A collector that remembers path, headers and body of each request; it answers with `status`."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[str, Mapping[str, str], bytes]] = queue.Queue()
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.received.put((self.path, dict(self.headers), body))
                self.send_response(outer.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def delivered(collector: Collector, **variables: str) -> tuple[str, Mapping[str, str], bytes]:
    """Deliver one span with these variables; return what the collector got."""
    environ = {ROOT + "ENDPOINT": collector.url} | {ROOT + name: value for name, value in variables.items()}
    telemetry = setup("gpuworker", ServiceSettings(trace_endpoint="127.0.0.1:1"), environ=environ)
    with telemetry.tracer.start_as_current_span("span"):
        pass
    await telemetry.aclose()
    path, headers, body = await asyncio.to_thread(collector.received.get, timeout=PATIENCE_S)
    return path, {name.lower(): value for name, value in headers.items()}, body


async def test_protobuf_is_posted_to_the_path_of_traces(collector: Collector) -> None:
    path, headers, body = await delivered(collector, PROTOCOL="http/protobuf", HEADERS="api-key=a%20b,x=y")
    assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
    assert (headers["api-key"], headers["x"]) == ("a b", "y")
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for span in resource.scope_spans[0].spans] == ["span"]


async def test_json_has_ids_in_hexadecimal_and_numbers_for_enums(collector: Collector) -> None:
    _, headers, body = await delivered(collector, PROTOCOL="http/json")
    assert headers["content-type"] == "application/json"
    (span,) = json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert (span["name"], len(span["traceId"]), len(span["spanId"]), span["kind"]) == ("span", 32, 16, 1)
    assert int(span["traceId"], 16) > 0


async def test_a_body_may_be_compressed(collector: Collector) -> None:
    _, headers, body = await delivered(collector, PROTOCOL="http/protobuf", COMPRESSION="gzip")
    assert headers["content-encoding"] == "gzip"
    assert len(ExportTraceServiceRequest.FromString(gzip.decompress(body)).resource_spans) == 1


async def test_the_endpoint_of_traces_wins_and_keeps_its_path(collector: Collector) -> None:
    variables = {"PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/protobuf", "TRACES_ENDPOINT": f"{collector.url}/in/here"}
    path, _, _ = await delivered(collector, **variables)
    assert path == "/in/here"


async def test_a_refusal_is_logged_once_and_so_is_its_end(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {ROOT + "ENDPOINT": collector.url, ROOT + "PROTOCOL": "http/protobuf"}
    telemetry = setup("gpuworker", ServiceSettings(), environ=environ)
    with caplog.at_level(logging.INFO):
        for status in (415, 503, 200):
            collector.status = status
            telemetry.tracer.start_span("span").end()
            await asyncio.to_thread(telemetry.flush)
    await telemetry.aclose()
    url = f"{collector.url}/v1/traces"
    lost, again = "cannot be delivered to %s; they are dropped until it answers", "are delivered to %s again"
    assert caplog.messages == [f"spans {lost % url}", f"spans {again % url}"]


async def test_a_collector_of_this_machine_is_reached_without_the_proxy(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_proxy() as proxy:
        for name, value in proxy.environ.items():
            monkeypatch.setenv(name, value)
        await delivered(collector, PROTOCOL="http/protobuf")
        assert proxy.asked == []


@pytest.mark.parametrize(
    ("variables", "field", "words"),
    [
        ({"PROTOCOL": "http/xml"}, "PROTOCOL", "is 'http/xml'; expected grpc, http/protobuf or http/json"),
        ({"TRACES_PROTOCOL": "thrift"}, "TRACES_PROTOCOL", "is 'thrift'; expected grpc"),
        ({"PROTOCOL": "http/json", "ENDPOINT": "collector:4318"}, "ENDPOINT", "expected http://HOST:PORT"),
        ({"PROTOCOL": "http/json", "COMPRESSION": "zip"}, "COMPRESSION", "is 'zip'; expected gzip or none"),
        ({"PROTOCOL": "http/json", "CERTIFICATE": "/no/ca"}, "CERTIFICATE", "/no/ca: "),
        ({"PROTOCOL": "http/json", "CLIENT_CERTIFICATE": "/no/own"}, "CLIENT_CERTIFICATE", "/no/own: "),
    ],
)
def test_what_cannot_be_followed_is_refused_at_start(variables: dict[str, str], field: str, words: str) -> None:
    environ = {ROOT + "ENDPOINT": "https://collector:4318"} | {ROOT + name: each for name, each in variables.items()}
    with pytest.raises(InvalidConfig) as caught:
        setup("router", ServiceSettings(), environ=environ)
    (violation,) = caught.value.violations
    assert violation.field == ROOT + field
    assert words in violation.description


def test_grpc_is_the_default_and_no_endpoint_is_no_collector() -> None:
    assert collector_of({}) is None
    assert collector_of({ROOT + "PROTOCOL": "http/json"}) is None
    found = collector_of({ROOT + "ENDPOINT": "http://collector:4317"})
    assert found is not None
    assert (found.url, found.protocol) == ("http://collector:4317", "grpc")
