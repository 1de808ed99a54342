"""Every failure is answered in OpenAI's form, and the official client makes of it the error that it has for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from common.contracts.errors import Overloaded, QuotaViolation, Unavailable
from common.contracts.limits import MAX_HTTP_BODY_BYTES
from router.api.openai.schema import ErrorBody
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.http_harness import DEADLINE_S, FACTS, HI, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
FULL = Overloaded(QuotaViolation("router.queue", "1024 of 1024"), 0.01)


def detail(answer: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer, after checking its form."""
    return ErrorBody.model_validate_json(answer.content, strict=True).error.model_dump()


@pytest.mark.parametrize(
    ("content", "headers", "param", "message"),
    [
        (b"{", JSON, None, "the body is not valid JSON: Expecting property name enclosed in double quotes at char"),
        (b"[1]", JSON, None, 'the body must be a JSON object, such as {"model": ...}'),
        (b"", JSON, None, 'the body must be a JSON object, such as {"model": ...}'),
        (
            b'{"prompt": "a"}', {"content-type": "text/plain"},
            None, "the content-type is text/plain; expected application/json",
        ),
        (b"{}", JSON, "prompt", "prompt: is missing"),
        (b'{"prompt": {}}', JSON, "prompt", "prompt: is {}; expected a valid string"),
        (b'{"prompt": "a", "n": "x", "top_p": []}', JSON, "top_p", "top_p: is []; expected a valid number; n: is 'x'"),
        (b'{"prompt": "a", "seed": 1.5}', JSON, "seed", "seed: is 1.5; expected a valid integer"),
        (b'{"prompt": "\\ud800"}', JSON, None, "a text has half of a surrogate pair"),
    ],
    ids=["broken", "list", "empty", "text", "missing", "object", "two", "seed", "surrogate"],
)  # fmt: skip
async def test_a_malformed_body_is_refused_with_what_is_wrong(
    api: Api, content: bytes, headers: dict[str, str], param: str | None, message: str
) -> None:
    answer = await api.http.post("/v1/completions", content=content, headers=headers)
    error = detail(answer)
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_argument")
    assert error["message"].startswith(message)
    assert error["param"] == param
    assert not api.frontend.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 2**31 - 1}, "n"),
        ({"prompt": "a", "stop": [""] * 100_000}, "stop"),
        ({"prompt": [[1]] * 2000}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [["a"]] * 2000}, "prompt"),
        ({"prompt": [["a"]] * 100_000}, "body"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_huge_mistake_is_answered_briefly(api: Api, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = await api.http.post("/v1/completions", json=body | {"stream": stream}, timeout=DEADLINE_S)
    assert (answer.status_code, detail(answer)["param"]) == (400, param)
    assert len(answer.content) < 5000


async def test_a_field_inside_a_message_is_named(api: Api) -> None:
    answer = await api.http.post("/v1/chat/completions", json={"messages": [*HI, {"content": "x"}]})
    assert detail(answer)["param"] == "messages[1].role"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/moderations", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
async def test_what_is_not_here_is_said_in_the_same_form(
    api: Api, method: str, path: str, status: int, code: str
) -> None:
    answer = await api.http.request(method, path)
    error = detail(answer)
    assert (answer.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert answer.headers["x-should-retry"] == "false"


async def test_a_refused_method_names_the_one_that_is_offered(api: Api) -> None:
    answer = await api.http.get("/v1/completions")
    assert (answer.headers["allow"], detail(answer)["message"]) == ("POST", "GET is not offered here; use POST")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5] * (FACTS.max_model_len + 1)}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 200_000}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": HI, "max_tokens": 10**6, "truncate_prompt_tokens": -1},
            "max_tokens",
        ),
    ],
)
async def test_what_the_context_cannot_hold_has_openais_code(
    api: Api, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await api.http.post(path, json=body)
    error = detail(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(
        f"This model's maximum context length is {FACTS.max_model_len} tokens. However, "
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_more_tokens_of_a_chat_than_the_context_holds_are_lowered(api: Api, name: str, stream: bool) -> None:
    body = {"messages": HI, name: 32_000, "stream": stream, "tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = await api.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    (request,) = api.frontend.requests
    left = FACTS.max_model_len - len(request.prompt)
    assert request.sampling.max_tokens == left
    note = f"max_tokens 32000 is lowered to {left}, which the context leaves"
    assert note in answer.headers["x-quire-note"]
    assert note in request.notes  # `quire why` shows them


async def test_a_length_without_a_prompt_speaks_of_none(api: Api) -> None:
    answer = await api.http.post("/v1/completions", json={"prompt": "word " * 200_000, "max_tokens": 10**6})
    assert "0 tokens" not in detail(answer)["message"].replace(f"{FACTS.max_model_len} tokens", "")
    assert f"max_tokens asks for {10**6}; lower max_tokens to" in detail(answer)["message"]


async def test_a_length_that_nobody_sent_is_named_as_the_default(api: Api) -> None:
    context = FACTS.max_model_len
    answer = await api.http.post("/v1/completions", json={"prompt": [5] * (context - 5)})
    assert detail(answer)["message"] == (
        f"This model's maximum context length is {context} tokens. However, the prompt has {context - 5} tokens, and"
        " max_tokens asks for 16 more; lower max_tokens to 5 or shorten the prompt (the body has no max_tokens: this is"
        " the default)"
    )


async def test_a_body_without_end_is_cut_off(api: Api) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 2 * MAX_HTTP_BODY_BYTES:
            sent += 1024 * 1024
            yield b" " * 1024 * 1024

    answer = await api.http.post("/v1/completions", content=endless(), headers=JSON)
    assert (answer.status_code, detail(answer)["code"]) == (413, "body_too_large")


async def test_a_request_without_memory_ends_and_may_be_sent_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(api.frontend, "generate", full)
    answer = await api.http.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert detail(answer)["message"].startswith("no memory is left for this request")


async def test_a_bug_is_an_error_of_the_server_that_discloses_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret of the prompt")

    monkeypatch.setattr(api.frontend, "generate", broken)
    answer = await api.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert detail(answer) == {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}


async def test_the_client_tries_again_when_the_router_is_full(api: Api) -> None:
    api.frontend.script = lambda request: (
        [FULL] if len(api.frontend.requests) < 3 else [admitted(request), tokens("late"), finished(1)]
    )
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=2) as patient:
        answer = await patient.completions.create(model="demo", prompt="a")
    assert (answer.choices[0].text, len(api.frontend.requests)) == ("late", 3)


async def test_the_client_does_not_repeat_what_cannot_succeed(api: Api) -> None:
    api.frontend.script = lambda request: [Unavailable("lost", 0.01)]
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=2) as patient:
        with pytest.raises(openai.BadRequestError):
            await patient.completions.create(model="demo", prompt="a", top_p=2)
    assert not api.frontend.requests


async def test_the_clients_own_timeout_ends_the_request(api: Api) -> None:
    async def attempt(seconds: float) -> None:
        never = asyncio.Event()
        api.frontend.script = lambda request: [admitted(request), tokens("a"), never]
        with pytest.raises(openai.APITimeoutError):
            await api.client.completions.create(model="demo", prompt="a", timeout=seconds)
        if not api.frontend.reached.is_set():
            raise TooSlow
        await asyncio.wait_for(api.frontend.closed.wait(), DEADLINE_S)

    await with_enough_time(attempt, 0.2)


async def test_a_task_cancelled_in_mid_stream_ends_the_request(api: Api) -> None:
    never, begun = asyncio.Event(), asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("a"), never]

    async def read() -> None:
        stream = await api.client.chat.completions.create(model="demo", messages=HI, stream=True)
        async with stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    begun.set()

    reading = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    reading.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), DEADLINE_S)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_the_synchronous_client_is_served_and_gets_the_same_errors(api: Api) -> None:
    def use() -> tuple[str, str, type[Exception]]:
        with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model="demo", prompt="a").choices[0].text
            with client.chat.completions.create(model="demo", messages=HI, stream=True) as stream:
                parts = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            try:
                client.completions.create(model="gpt-9", prompt="a")
            except openai.APIStatusError as error:
                return whole, parts, type(error)
        raise AssertionError("another model was served")

    assert await asyncio.to_thread(use) == ("Hello world", "Hello world", openai.NotFoundError)
