"""Every kind of answer has exactly what the models of the official client have, and what Quire adds by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai.pagination import AsyncPage
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import InputTokenCountResponse, Response, ResponseItemList, ResponseStreamEvent

from common.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    Overloaded,
    PermissionDenied,
    QuireError,
    QuotaViolation,
    Unauthenticated,
    Unavailable,
)
from common.contracts.limits import MAX_HTTP_CHAT_BYTES
from common.contracts.types import FinishReason, TokenLogprobs
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.tenants.tenancy import Caller, Tenant
from tests.support.official_models import CompletionChunk, ErrorBody, hold
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import DEADLINE_S, HI, Api, served_api
from tests.support.router.responses import says

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION: Any = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FUNCTIONS: Any = [{"type": "function", **FUNCTION}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 71}}\n</tool_call>'
THOUGHT = ("<think>", "Well", "</think>", "\n\n")
PROBABLE: Any = {"n": 2, "return_token_ids": True}


class Doors:
    """Keys that are not known, and one that may do nothing."""

    def caller(self, authorization: str, host: str) -> Caller:
        if authorization == "Bearer stranger":
            raise Unauthenticated("the key is not known here")
        if authorization == "Bearer guest":
            raise PermissionDenied("the key may do nothing here")
        return Caller(Tenant("test"))

    def is_live(self, caller: Caller) -> bool:
        return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    """A model that writes calls as Hermes and Qwen do, and thoughts as Qwen3 does."""
    async with served_api(Doors(), tools="hermes", reasoning="qwen3") as running:
        yield running


def probable(request: ValidatedRequest) -> list[Step]:
    """Two sequences with log-probabilities; one ends at a stop text."""
    given = (TokenLogprobs(40, -0.5, ((40, -0.5), (41, -1.5))),)
    events: list[GenerateEvent] = [admitted(request, cached=1)]
    events += [tokens("a", 40, index=index, logprobs=given) for index in (1, 0)]
    return [*events, finished(1, index=1, stop="END"), finished(1, reason=FinishReason.LENGTH)]


def one_probable(request: ValidatedRequest) -> list[Step]:
    given = (TokenLogprobs(40, -0.5, ((40, -0.5), (41, -1.5))),)
    return [admitted(request), tokens("a", 40, logprobs=given), finished(1)]


# What the model says, and the body that asks for it.
CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (says("Hello"), {}),
    "logprobs": (probable, PROBABLE | {"logprobs": True, "top_logprobs": 2}),
    "calls": (says(CALL, "\n", CALL), {"tools": TOOLS}),
    "named": (says(CALL), {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}),
    "function": (says(CALL), {"functions": [FUNCTION], "function_call": "auto"}),
    "thought": (says(*THOUGHT, "Yes"), {}),
    "thought and call": (says(*THOUGHT, "Words.", CALL), {"tools": TOOLS}),
    "cut call": (says(CALL[:45], reason=FinishReason.LENGTH), {"tools": TOOLS}),
    "object": (says('{"a": 71}'), {"response_format": {"type": "json_object"}}),
    "call beside a form": (
        says(CALL),
        {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
}
TEXTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (says("Hello"), {}),
    "logprobs": (probable, PROBABLE | {"logprobs": 2}),
    "echo": (says("Hello"), {"echo": True}),
}
ITEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (says("Hel", "lo", cached=3), {"instructions": "Be brief.", "metadata": {"who": "me"}}),
    "thought": (says(*THOUGHT, "Yes"), {"reasoning": {"summary": "auto"}}),
    "logprobs": (one_probable, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "calls": (says(*THOUGHT, CALL, "\n", CALL), {"tools": FUNCTIONS, "tool_choice": "auto"}),
    "named": (says(CALL), {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "add"}}),
    "cut": (says("Hel", reason=FinishReason.LENGTH), {"max_output_tokens": 1}),
    "form": (
        says('{"a": 71}'),
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
    ),
    "not kept": (says("Hello"), {"store": False, "truncation": "auto"}),
}


def lines_of(answer: httpx.Response) -> list[str]:
    """Return the data of each event of a stream."""
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


async def test_models(api: Api) -> None:
    listed = await api.http.get("/v1/models")
    assert {*listed.json()} == {"object", "data"}
    assert hold(AsyncPage[Model], listed.content).data
    hold(Model, (await api.http.get("/v1/models/demo")).content)


@pytest.mark.parametrize("kind", CHATS)
async def test_chats(api: Api, kind: str) -> None:
    api.frontend.script, body = CHATS[kind]
    answer = await api.http.post(CHAT, json={"messages": HI} | body)
    assert answer.status_code == 200, answer.text
    hold(ChatCompletion, answer.content)


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("options", [{}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_chunks_of_chats(api: Api, kind: str, options: dict[str, bool]) -> None:
    api.frontend.script, body = CHATS[kind]
    asked = {"messages": HI, "stream": True, "stream_options": options} | body
    *chunks, last = lines_of(await api.http.post(CHAT, json=asked))
    assert (len(chunks) > 1, last) == (True, "[DONE]")
    for chunk in chunks:
        hold(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("kind", TEXTS)
async def test_completions(api: Api, kind: str) -> None:
    api.frontend.script, body = TEXTS[kind]
    answer = await api.http.post(COMPLETIONS, json={"prompt": "a"} | body)
    assert answer.status_code == 200, answer.text
    hold(Completion, answer.content)


@pytest.mark.parametrize("kind", TEXTS)
async def test_chunks_of_completions(api: Api, kind: str) -> None:
    api.frontend.script, body = TEXTS[kind]
    asked = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}} | body
    *chunks, last = lines_of(await api.http.post(COMPLETIONS, json=asked))
    assert (len(chunks) > 1, last) == (True, "[DONE]")
    for chunk in chunks:
        hold(CompletionChunk, chunk)


@pytest.mark.parametrize("kind", ITEMS)
async def test_responses_and_what_is_kept_of_them(api: Api, kind: str) -> None:
    api.frontend.script, body = ITEMS[kind]
    answer = await api.http.post(RESPONSES, json={"input": "Hi"} | body)
    assert answer.status_code == 200, answer.text
    made = hold(Response, answer.content)
    if body.get("store") is not False:
        hold(Response, (await api.http.get(f"{RESPONSES}/{made.id}")).content)
        hold(ResponseItemList, (await api.http.get(f"{RESPONSES}/{made.id}/input_items")).content)


@pytest.mark.parametrize("kind", ITEMS)
async def test_events_of_responses(api: Api, kind: str) -> None:
    api.frontend.script, body = ITEMS[kind]
    answer = await api.http.post(RESPONSES, json={"input": "Hi", "stream": True} | body)
    events = [hold(ResponseStreamEvent, line) for line in lines_of(answer)]
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


async def test_items_of_every_kind_that_were_sent(api: Api) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add!"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Well"}]},
        {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
        {"role": "assistant", "content": "It is 1."},
        {"role": "user", "content": "And then?"},
    ]
    made = hold(Response, (await api.http.post(RESPONSES, json={"input": turns, "tools": FUNCTIONS})).content)
    listed = hold(ResponseItemList, (await api.http.get(f"{RESPONSES}/{made.id}/input_items")).content)
    assert len(listed.data) == len(turns)


async def test_a_background_response_while_it_runs_and_when_it_is_cancelled(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), asyncio.Event()]
    queued = hold(Response, (await api.http.post(RESPONSES, json={"input": "Hi", "background": True})).content)
    await asyncio.wait_for(api.frontend.reached.wait(), DEADLINE_S)
    running = hold(Response, (await api.http.get(f"{RESPONSES}/{queued.id}")).content)
    cancelled = hold(Response, (await api.http.post(f"{RESPONSES}/{queued.id}/cancel")).content)
    assert queued.status in ("queued", "in_progress")
    assert (running.status, cancelled.status) == ("in_progress", "cancelled")


async def test_events_of_a_background_response(api: Api) -> None:
    answer = await api.http.post(RESPONSES, json={"input": "Hi", "background": True, "stream": True})
    events = [hold(ResponseStreamEvent, line) for line in lines_of(answer)]
    assert "response.queued" in [event.type for event in events]
    name = events[0].response.id
    again = await api.http.get(f"{RESPONSES}/{name}", params={"stream": True, "starting_after": 0})
    assert [hold(ResponseStreamEvent, line) for line in lines_of(again)] == events[1:]


async def test_a_response_that_fails(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), EngineFailure("lost 4 workers")]
    lines = lines_of(await api.http.post(RESPONSES, json={"input": "Hi", "stream": True}))
    failed = [hold(ResponseStreamEvent, line) for line in lines][-1]
    assert failed.type == "response.failed"


async def test_a_count_of_tokens(api: Api) -> None:
    hold(InputTokenCountResponse, (await api.http.post(f"{RESPONSES}/input_tokens", json={"input": "Hi"})).content)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded(QuotaViolation("router", "full"), 1.0), 429),
        (Cancelled("gone"), 499),
        (EngineFailure("lost 4 workers"), 500),
        (Unavailable("no worker is there", 1.0), 503),
        (DeadlineExceeded("too late"), 504),
    ],
)
async def test_errors_of_the_work(api: Api, path: str, error: QuireError, status: int) -> None:
    api.frontend.script = lambda request: [error]
    body = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "Hi"}}[path]
    answer = await api.http.post(path, json=body)
    assert answer.status_code == status
    hold(ErrorBody, answer.content)


@pytest.mark.parametrize(
    ("method", "path", "given", "status"),
    [
        ("POST", CHAT, {"content": b"{"}, 400),
        ("POST", CHAT, {"json": {"messages": HI, "temperature": -1}}, 400),
        ("POST", RESPONSES, {"json": {"input": [], "model": "demo"}}, 400),
        ("GET", "/v1/models", {"headers": {"authorization": "Bearer stranger"}}, 401),
        ("GET", "/v1/models", {"headers": {"authorization": "Bearer guest"}}, 403),
        ("GET", "/v1/models/gpt-9", {}, 404),
        ("GET", "/v1/nothing", {}, 404),
        ("GET", f"{RESPONSES}/resp_{'0' * 32}", {}, 404),
        ("GET", CHAT, {}, 405),
        ("POST", CHAT, {"content": b"x" * (MAX_HTTP_CHAT_BYTES + 1)}, 413),
    ],
)
async def test_refusals(api: Api, method: str, path: str, given: dict[str, Any], status: int) -> None:
    answer = await api.http.request(method, path, **given)
    assert answer.status_code == status, answer.text
    hold(ErrorBody, answer.content)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_in_mid_stream(api: Api, path: str) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), Unavailable("the worker is gone", 0.5)]
    *_, broken, _ = lines_of(await api.http.post(path, json={"messages": HI, "prompt": "a", "stream": True}))
    hold(ErrorBody, broken)


async def test_a_field_too_much_or_too_few_is_found() -> None:
    model = {"id": "a", "object": "model", "created": 1, "owned_by": "quire"}
    hold(Model, json.dumps(model))
    with pytest.raises(AssertionError, match=r"Model\.kind"):
        hold(Model, json.dumps(model | {"kind": 1}))
    with pytest.raises(ValueError, match="owned_by"):
        hold(Model, json.dumps({**model, "owned_by": None}))
