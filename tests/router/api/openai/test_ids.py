"""The ids in the headers of answers: the client's own name for requests, the router's id, and that of the trace."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.limits import MAX_HTTP_BODY_BYTES, MAX_SESSION_ID_CHARS
from router.contracts.session_ids import session_name
from tests.support.router.callers import Closed
from tests.support.router.fake_frontend import TRACE_ID, admitted, finished
from tests.support.router.http_harness import DEADLINE_S, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALIKE = {"x-request-id": "of-a-proxy"}


async def complete(api: Api, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await api.http.post("/v1/completions", json={"prompt": "a"} | fields, headers=headers, timeout=DEADLINE_S)


async def test_two_requests_at_once_may_have_one_correlation_id(api: Api) -> None:
    together = asyncio.Event()

    def script(request: Any) -> Any:
        if len(api.frontend.requests) == 2:
            together.set()
        return [together, admitted(request), finished(0)]

    api.frontend.script = script
    answers = await asyncio.gather(complete(api, ALIKE), complete(api, ALIKE))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {answer.headers["x-request-id"] for answer in answers} == {"of-a-proxy"}
    own = [request.request_id for request in api.frontend.requests]
    assert len(set(own)) == 2
    assert {answer.headers["x-quire-request-id"] for answer in answers} == set(own)
    assert {request.correlation_id for request in api.frontend.requests} == {"of-a-proxy"}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("two words", "two words"),
        ("r" * 1000, "r" * 128),
        ("caf\u00e9", "caf?"),
        ("quire-" + "0" * 32, "quire-" + "0" * 32),
    ],
    ids=["spaces", "long", "letters", "ours"],
)
async def test_a_correlation_id_is_cut_and_cleaned_and_never_refused(api: Api, sent: str, kept: str) -> None:
    by_header = await complete(api, {"x-request-id": sent.encode("latin-1")})  # type: ignore[dict-item]
    by_body = await complete(api, request_id=sent)
    for answer in (by_header, by_body):
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, kept)
    assert all((request.request_id or "").startswith("quire-") for request in api.frontend.requests)
    assert sent not in {request.request_id for request in api.frontend.requests}
    recorded = "" if sent.startswith("quire-") else kept
    assert {request.correlation_id for request in api.frontend.requests} == {recorded}


async def test_an_id_in_a_body_cannot_break_a_header(api: Api) -> None:
    answer = await complete(api, request_id="a\r\nset-cookie: b")
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "a??set-cookie: b")


async def test_without_a_correlation_id_the_routers_own_stands_for_it(api: Api) -> None:
    answer = await complete(api)
    own = api.frontend.requests[0].request_id
    assert answer.headers["x-request-id"] == answer.headers["x-quire-request-id"] == own
    assert answer.json()["id"] == f"cmpl-{own}"


async def test_prompts_of_one_body_have_ids_of_their_own(api: Api) -> None:
    answer = await complete(api, ALIKE, prompt=["a", "b"])
    own = answer.headers["x-quire-request-id"]
    assert {request.request_id for request in api.frontend.requests} == {f"{own}-0", f"{own}-1"}
    assert answer.json()["id"] == f"cmpl-{own}"


async def test_the_trace_state_goes_with_the_clients_trace_alone(api: Api) -> None:
    """A client may send it in several headers."""
    state = [("tracestate", "a=1"), ("tracestate", "b=2")]
    for more in ([("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")], [("traceparent", "nonsense")], []):
        answer = await api.http.post("/v1/completions", json={"prompt": "a"}, headers=[*more, *state])
        assert answer.status_code == 200
    assert [each.tracestate for each in api.frontend.requests] == ["a=1,b=2", "", ""]


async def test_the_trace_is_the_clients_or_begins_here(api: Api) -> None:
    trace = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    answer = await complete(api, {"traceparent": trace})
    assert (answer.headers["x-trace-id"], api.frontend.requests[0].traceparent[3:35]) == (TRACE_ID, TRACE_ID)
    api.frontend.script = lambda request: [Overloaded(QuotaViolation("router.queue", "1 of 1"), 1.0)]
    refused = await complete(api)
    assert (refused.status_code, refused.headers["x-trace-id"]) == (429, api.frontend.requests[1].traceparent[3:35])


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("POST", "/v1/completions", {"json": {"prompt": "a", "n": 0}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": []}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": "a", "model": "other"}}, 404),
        ("POST", "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/v1/completions", {"content": b" " * (MAX_HTTP_BODY_BYTES + 1)}, 413),
        ("GET", "/v1/completions", {}, 405),
        ("GET", "/nothing", {}, 404),
    ],
)
async def test_every_error_carries_the_ids(api: Api, method: str, path: str, sent: dict[str, Any], status: int) -> None:
    headers = {**ALIKE, "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-00", **sent.pop("headers", {})}
    answer = await api.http.request(method, path, headers=headers, timeout=DEADLINE_S, **sent)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert (answer.headers["x-request-id"], answer.headers["x-trace-id"]) == ("of-a-proxy", TRACE_ID)
    assert answer.headers["x-quire-request-id"].startswith("quire-")


async def test_a_missing_key_and_a_bug_carry_them_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_api(Closed()) as closed:
        refused = await closed.http.get("/v1/models", headers=ALIKE)
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "of-a-proxy")
    assert len(refused.headers["x-trace-id"]) == 32
    monkeypatch.setattr(api.frontend, "script", lambda request: 1 // 0)
    broken = await complete(api, ALIKE)
    assert (broken.status_code, broken.headers["x-request-id"]) == (500, "of-a-proxy")
    assert len(broken.headers["x-trace-id"]) == 32


async def test_what_is_no_http_is_answered_with_ids(api: Api) -> None:
    url = httpx.URL(api.url)
    reader, writer = await asyncio.open_connection(url.host, url.port, family=socket.AF_INET)
    writer.write(b"?" * 10 + b"\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    assert head.startswith("HTTP/1.1 400 ")
    assert "\r\nx-request-id: " in head
    assert "\r\nx-trace-id: " in head


@pytest.mark.parametrize(
    ("path", "body", "chat"),
    [
        ("/v1/completions", {"prompt": "a"}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, True),
        ("/v1/responses", {"input": "a", "store": False}, True),
    ],
)
async def test_traces_know_the_operation_and_the_name_of_the_model(
    path: str, body: dict[str, Any], chat: bool, api: Api
) -> None:
    models = (await api.http.get("/v1/models", timeout=DEADLINE_S)).json()["data"]
    name = models[-1]["id"]
    answer = await api.http.post(path, json=body | {"model": name}, timeout=DEADLINE_S)
    assert answer.status_code == 200
    (request,) = api.frontend.requests
    assert (request.model, request.chat) == (name, chat)


# ------------------------------------------------------------ sessions


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_session_comes_by_header_or_by_body_which_counts_more(api: Api, path: str) -> None:
    for sent, headers in (({}, {}), ({}, {"session_id": "talk"}), ({"session_id": "other"}, {"x-session-id": "talk"})):
        answer = await api.http.post(path, json=BODIES[path] | sent, headers=headers, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
    names = ["", session_name("", "talk"), session_name("", "other")]
    assert [each.session for each in api.frontend.requests] == names


@pytest.mark.parametrize("path", BODIES)
async def test_a_session_id_in_a_body_is_bounded(api: Api, path: str) -> None:
    for length, status in ((MAX_SESSION_ID_CHARS, 200), (MAX_SESSION_ID_CHARS + 1, 400)):
        body = BODIES[path] | {"session_id": "a" * length}
        answer = await api.http.post(path, json=body, timeout=DEADLINE_S)
        assert answer.status_code == status, answer.text
    assert "session_id" in answer.text
    assert "at most 256 characters" in answer.text
    assert len(api.frontend.requests) == 1


async def test_a_response_of_a_conversation_belongs_to_its_session(api: Api) -> None:
    created = await api.http.post("/v1/conversations", json={}, timeout=DEADLINE_S)
    name = created.json()["id"]
    for sent in ({}, {"session_id": "talk"}):
        body = {"input": "Hi", "conversation": name} | sent
        assert (await api.http.post("/v1/responses", json=body, timeout=DEADLINE_S)).status_code == 200
    assert [each.session for each in api.frontend.requests] == [session_name("", name), session_name("", "talk")]
