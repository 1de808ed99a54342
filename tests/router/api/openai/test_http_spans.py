"""The span of an HTTP request: its name, kind, attributes and status by the conventions, and what hangs below it."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import httpx
import pytest
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
)
from opentelemetry.trace import SpanKind, StatusCode

from common.contracts.errors import Overloaded, QuotaViolation, Unavailable
from common.telemetry.spans import RecordedSpan
from tests.support.router.fake_frontend import admitted, finished
from tests.support.router.http_harness import DEADLINE_S, Api, served_api
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
STABLE = {
    value
    for module in (error_attributes, http_attributes, network_attributes, server_attributes, url_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def span_after(api: Api, method: str, path: str, **sent: Any) -> tuple[httpx.Response, RecordedSpan]:
    """Return an answer and the span of its request, which ends a moment after the answer."""
    trace_id = secrets.token_hex(16)
    sent["headers"] = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", **sent.get("headers", {})}
    answer = await api.http.request(method, path, timeout=DEADLINE_S, **sent)
    (span,) = await until(lambda: spans_in(api, trace_id))
    return answer, span


def spans_in(api: Api, trace_id: str) -> list[RecordedSpan]:
    return [each for each in api.spans.ended() if f"{each.context.trace_id:032x}" == trace_id]


async def test_a_request_is_a_server_s_span_by_the_stable_conventions(api: Api) -> None:
    state = {"tracestate": "vendor=a:1"}
    answer, span = await span_after(api, "POST", "/v1/chat/completions", json=CHAT, headers=state)
    assert answer.status_code == 200
    assert (span.name, span.kind, span.status.status_code) == (
        "POST /v1/chat/completions",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    url = httpx.URL(api.url)
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": url.host,
        "server.port": url.port,
    }
    assert set(span.attributes) <= STABLE
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (span.context.trace_id, 0xB7AD6B7169203331)
    asked, below = api.frontend.requests[0], f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
    assert (asked.traceparent, asked.tracestate) == (below, "vendor=a:1")
    assert asked.response_id == answer.json()["id"]


async def test_a_request_without_a_trace_begins_the_one_that_its_answer_names(api: Api) -> None:
    answer = await api.http.post("/v1/completions", json={"prompt": "a", "n": 0})
    (span,) = await until(lambda: spans_in(api, answer.headers["x-trace-id"]))
    assert (answer.status_code, span.parent) == (400, None)


@pytest.mark.parametrize(
    ("method", "path", "sent", "name", "status"),
    [
        ("GET", "/v1/models", {}, "GET /v1/models", 200),
        ("GET", "/v1/models/demo", {}, "GET /v1/models/{name:path}", 200),
        ("POST", "/v1/messages", {"json": {}}, "POST /v1/messages", 400),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "model": "other"}}, "POST /v1/completions", 404),
        ("POST", "/v1/embeddings", {"content": b"{"}, "POST /v1/embeddings", 400),
        ("GET", "/v1/responses/resp_1", {}, "GET /v1/responses/{response_id}", 404),
        ("POST", "/v1/rerank", {"json": {}}, "POST /v1/rerank", 400),
        ("GET", "/secret/path", {}, "GET", 404),
        ("PROPFIND", "/v1/models", {}, "HTTP /v1/models", 405),
    ],
)
async def test_a_span_is_named_by_its_route_and_a_client_s_fault_is_no_error(
    api: Api, method: str, path: str, sent: dict[str, Any], name: str, status: int
) -> None:
    answer, span = await span_after(api, method, path, **sent)
    assert (answer.status_code, span.attributes["http.response.status_code"]) == (status, status)
    assert (span.name, span.status.status_code) == (name, StatusCode.UNSET)
    assert "error.type" not in span.attributes
    assert span.attributes["http.request.method"] == ("_OTHER" if method == "PROPFIND" else method)


ERRORS = {
    "limited": (Overloaded(QuotaViolation("router.queue", "1 of 1"), 1.0), 429, StatusCode.UNSET, None),
    "unavailable": (Unavailable("no worker"), 503, StatusCode.ERROR, "503"),
}


@pytest.mark.parametrize("how", ERRORS)
async def test_an_error_of_the_server_alone_is_one_of_its_span(api: Api, how: str) -> None:
    error, status, expected, kind = ERRORS[how]
    api.frontend.script = lambda _: [error]
    answer, span = await span_after(api, "POST", "/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, span.status.status_code) == (status, expected)
    assert span.attributes.get("error.type") == kind


async def test_a_bug_is_an_error_of_its_type(api: Api) -> None:
    def script(_: object) -> Any:
        raise ZeroDivisionError

    api.frontend.script = script
    answer, span = await span_after(api, "POST", "/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, span.attributes["http.response.status_code"]) == (500, 500)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "ZeroDivisionError")


async def test_a_stream_is_in_its_span_to_the_end(api: Api) -> None:
    goes_on = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), goes_on, finished(0)]
    trace_id, body = secrets.token_hex(16), {"prompt": "a", "stream": True}
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    asked = api.http.stream("POST", "/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)
    async with asked as answer:
        assert (answer.status_code, spans_in(api, trace_id)) == (200, [])
        goes_on.set()
        await answer.aread()
    (span,) = await until(lambda: spans_in(api, trace_id))
    assert span.name == "POST /v1/completions"


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
async def test_probes_have_no_span(api: Api, path: str) -> None:
    probed = await api.http.get(path)
    await span_after(api, "GET", "/v1/models")
    assert spans_in(api, probed.headers["x-trace-id"]) == []


async def test_a_path_below_a_root_is_named_whole_and_routed_without_it() -> None:
    async with served_api(root_path="/llm") as api:
        _, span = await span_after(api, "GET", "/llm/v1/models")
        assert (span.name, span.attributes["url.path"]) == ("GET /v1/models", "/llm/v1/models")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("api.example.com", ("api.example.com", None)), ("a.b:81", ("a.b", 81)), ("[::1]:9", ("::1", 9))],
)
async def test_a_server_is_called_as_its_client_calls_it(api: Api, host: str, expected: tuple[str, int | None]) -> None:
    _, span = await span_after(api, "GET", "/v1/models", headers={"host": host})
    assert (span.attributes["server.address"], span.attributes.get("server.port")) == expected
