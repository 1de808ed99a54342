"""What the HTTP application reports of its answers with an error: once each, by the path as it is declared, and why."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from common.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    Overloaded,
    QuireError,
    QuotaViolation,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from common.contracts.limits import MAX_HTTP_BODY_BYTES
from router.contracts.refusals import FAULTS
from router.tenants.tenancy import Caller
from tests.support.router.fake_worker import PATIENCE_S
from tests.support.router.http_harness import HI, Api, served_api
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "xyzzy"
JSON = {"content-type": "application/json"}
# name: (method, path, what httpx is given, (api, method, code, reason))
WRONG: dict[str, tuple[str, str, dict[str, Any], tuple[str, str, str, str]]] = {
    "no JSON": (
        "POST", "/v1/completions", {"content": b"{xyzzy", "headers": JSON},
        ("openai", "/v1/completions", "400", "MALFORMED")),
    "no object": (
        "POST", "/v1/embeddings", {"json": [SECRET]}, ("openai", "/v1/embeddings", "400", "MALFORMED")),
    "another content": (
        "POST", "/v1/messages", {"content": SECRET.encode(), "headers": {"content-type": "text/plain"}},
        ("anthropic", "/v1/messages", "400", "MALFORMED")),
    "a zero byte": (
        "POST", "/tokenize", {"content": b'{"prompt": "\0"}', "headers": JSON},
        ("openai", "/tokenize", "400", "MALFORMED")),
    "not compressed": (
        "POST", "/v1/completions", {"content": SECRET.encode(), "headers": {**JSON, "content-encoding": "gzip"}},
        ("openai", "/v1/completions", "400", "MALFORMED")),
    "another coding": (
        "POST", "/v1/completions", {"content": SECRET.encode(), "headers": {**JSON, "content-encoding": SECRET}},
        ("openai", "/v1/completions", "415", "CODING_NOT_SERVED")),
    "too large": (
        "POST", "/v1/completions",
        {"content": gzip.compress(b" " * (MAX_HTTP_BODY_BYTES + 1)), "headers": {**JSON, "content-encoding": "gzip"}},
        ("openai", "/v1/completions", "413", "TOO_LARGE")),
    "wrong types": (
        "POST", "/v1/completions", {"json": {"prompt": "a", "logit_bias": {SECRET: SECRET}, "temperature": SECRET}},
        ("openai", "/v1/completions", "400", "INVALID_FIELD")),
    "another model": (
        "GET", f"/v1/models/{SECRET}/{SECRET}", {}, ("openai", "/v1/models/{name:path}", "404", "MODEL_NOT_FOUND")),
    "no path": ("GET", f"/{SECRET}", {}, ("openai", "unknown", "404", "UNKNOWN_PATH")),
    "no path of the other API": (
        "POST", f"/v1/messages/{SECRET}", {}, ("anthropic", "unknown", "404", "UNKNOWN_PATH")),
    "no method": ("DELETE", "/v1/completions", {}, ("openai", "/v1/completions", "405", "METHOD_NOT_ALLOWED")),
    "a method that nobody knows": (
        SECRET.upper(), "/v1/completions", {}, ("http", "connection", "400", "MALFORMED")),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
async def test_a_wrong_request_is_reported_once_without_a_word_of_it(api: Api, kind: str) -> None:
    method, path, given, expected = WRONG[kind]
    answer = await api.http.request(method, path, **given)
    (seen,) = api.refusals.seen
    assert (seen.api, seen.method, seen.code, seen.reason) == expected
    assert str(answer.status_code) == seen.code
    assert seen.request_id == answer.headers["x-quire-request-id"]
    assert seen.reason in FAULTS
    assert SECRET not in str(seen).lower()
    assert api.refusals.probes == []


async def test_wrong_types_are_named_by_their_fields(api: Api) -> None:
    await api.http.post("/v1/completions", json={"prompt": "a", "n": "x", "logit_bias": {SECRET: SECRET}})
    assert api.refusals.seen[0].words == ("n: has a wrong type or form", "logit_bias: has a wrong type or form")


async def test_the_clients_own_name_is_reported_but_for_one_like_the_routers(api: Api) -> None:
    for name in ("mine", "quire-0"):
        await api.http.get("/nowhere", headers={"x-request-id": name})
    assert [each.client_id for each in api.refusals.seen] == ["mine", ""]


ERRORS: list[tuple[QuireError, str, str, str]] = [
    (RateLimited(QuotaViolation("tenant a.streams", "1 is open"), 1.0), "429", "429", "RATE_LIMITED"),
    (Overloaded(QuotaViolation("router.queue", "full"), 1.0), "429", "529", "OVERLOADED"),
    (Unavailable("no worker"), "503", "529", "UNAVAILABLE"),
    (DeadlineExceeded("too late"), "504", "504", "DEADLINE_EXCEEDED"),
    (EngineFailure("step 7"), "500", "500", "ENGINE_FAILURE"),
    (Cancelled("the client went away"), "499", "499", "CANCELLED"),
]


@pytest.mark.parametrize(("error", "code", "other_code", "reason"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_event_is_reported_by_each_api(
    api: Api, error: QuireError, code: str, other_code: str, reason: str, stream: bool
) -> None:
    api.frontend.script = lambda request: [error]
    body = {"messages": HI, "max_tokens": 2, "model": "demo", "stream": stream}
    responses = {"input": "Hi", "stream": stream}
    for path, given in (("/v1/chat/completions", body), ("/v1/messages", body), ("/v1/responses", responses)):
        await api.http.post(path, json=given)
    assert [(each.api, each.method, each.code, each.reason) for each in api.refusals.seen] == [
        ("openai", "/v1/chat/completions", code, reason),
        ("anthropic", "/v1/messages", other_code, reason),
        ("openai", "/v1/responses", code, reason),
    ]


async def test_a_bug_is_reported_though_its_answer_passes_no_middleware(api: Api) -> None:
    def broken(request: object) -> list[Any]:
        raise ZeroDivisionError(SECRET)

    api.frontend.script = broken
    answer = await api.http.post("/v1/completions", json={"prompt": "a"})
    (seen,) = api.refusals.seen
    assert (answer.status_code, seen.code, seen.reason, seen.words) == (500, "500", "INTERNAL", ())
    assert seen.request_id == answer.headers["x-quire-request-id"]


async def test_what_is_served_and_what_probes_get_is_no_refusal(api: Api) -> None:
    assert (await api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).status_code == 200
    assert (await api.http.get("/health")).status_code == 200
    api.is_ready = False
    for path in ("/health", "/ping"):
        assert (await api.http.get(path)).status_code == 503
    assert api.refusals.seen == []
    counted = [(each.method, each.code, each.reason) for each in api.refusals.probes]
    assert counted == [("/health", "503", "UNAVAILABLE"), ("/ping", "503", "UNAVAILABLE")]


class Nobody:
    def caller(self, authorization: str, host: str) -> Caller:
        raise Unauthenticated("no key")

    def is_live(self, caller: Caller) -> bool:
        return False


async def test_a_caller_without_a_key_is_reported_with_the_path_it_asked_for() -> None:
    async with served_api(Nobody()) as api:
        for path in ("/v1/chat/completions", "/v1/messages", f"/{SECRET}"):
            assert (await api.http.post(path, json={})).status_code == 401
        seen = [(each.api, each.method, each.code, each.reason) for each in api.refusals.seen]
    assert seen == [
        ("openai", "/v1/chat/completions", "401", "UNAUTHENTICATED"),
        ("anthropic", "/v1/messages", "401", "UNAUTHENTICATED"),
        ("openai", "unknown", "401", "UNAUTHENTICATED"),
    ]


async def test_a_page_that_may_not_call_is_reported() -> None:
    async with served_api(cors_origins=("https://here.example",)) as api:
        asks = {"origin": f"https://{SECRET}.example", "access-control-request-method": "POST"}
        answer = await api.http.options("/v1/completions", headers=asks)
        (seen,) = api.refusals.seen
    assert (answer.status_code, seen.method, seen.reason) == (400, "/v1/completions", "PERMISSION_DENIED")
    assert SECRET not in str(seen)


async def test_what_is_no_http_is_reported_with_the_id_of_its_answer(api: Api) -> None:
    host, _, port = api.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"xyzzy\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        answer = (await reader.read()).decode()
    writer.close()
    await until(lambda: bool(api.refusals.seen))
    (seen,) = api.refusals.seen
    assert (seen.api, seen.method, seen.code, seen.reason) == ("http", "connection", "400", "MALFORMED")
    assert f"x-quire-request-id: {seen.request_id}" in answer
