"""Streams over HTTP that go on after `Last-Event-ID`: each event comes once, wherever the first stream broke."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from common.contracts.errors import NotFound
from common.contracts.types import FinishReason, TokenLogprobs
from router.contracts.events import Tokens, ValidatedRequest
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import HI, Api, served_api

Body = dict[str, Any]
IDS: Body = {"event_ids": True}
CHAT: Body = {"model": "demo", "messages": HI, "stream": True, "stream_options": IDS}
COMPLETION: Body = {"model": "demo", "prompt": "Hi", "stream": True, "stream_options": IDS}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with served_api(tools="hermes", reasoning="deepseek_r1") as made:
        yield made


async def events_of(api: Api, path: str, body: Body, last: str | None = None) -> list[tuple[str, str]]:
    """Return the (id, data) of every event; "" for an event without an id."""
    headers = {} if last is None else {"Last-Event-ID": last}
    answer = await api.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    found = []
    for lines in events:
        fields = dict(line.split(": ", 1) for line in lines)
        found.append((fields.get("id", ""), fields["data"]))
    return found


def plain(request: ValidatedRequest) -> list[Step]:
    likely = TokenLogprobs(5, -0.5, ((5, -0.5),))
    return [
        admitted(request),
        tokens("Hel", 5, logprobs=(likely,) if request.sampling.logprobs is not None else ()),
        tokens("lo", 6, logprobs=(likely,) if request.sampling.logprobs is not None else ()),
        tokens("", 7, logprobs=(likely,) if request.sampling.logprobs is not None else ()),
        tokens(" you", 8, logprobs=(likely,) if request.sampling.logprobs is not None else ()),
        Tokens(0, ".", ()),
        finished(4, reason=FinishReason.LENGTH),
    ]


def two(request: ValidatedRequest) -> list[Step]:
    return [
        admitted(request),
        tokens("a", 5),
        tokens("x", 5, index=1),
        tokens("b", 6),
        finished(2),
        tokens("y", 6, index=1),
        finished(2, index=1),
    ]


def call(request: ValidatedRequest) -> list[Step]:
    text = '<think>hm</think>Let me.<tool_call>{"name": "look", "arguments": {"at": "the sky"}}</tool_call>'
    pieces = [text[at : at + 9] for at in range(0, len(text), 9)]
    return [admitted(request), *(tokens(each, 5) for each in pieces), finished(len(pieces))]


def stopped(request: ValidatedRequest) -> list[Step]:
    """The thought spells the stop text, and so does the answer, which ends there."""
    text = "<think>it is ok</think>All is ok"
    pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
    return [admitted(request), *(tokens(each, 5) for each in pieces), finished(len(pieces), stop="ok")]


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CASES: dict[str, tuple[str, Body, Callable[[ValidatedRequest], list[Step]]]] = {
    "chat": ("/v1/chat/completions", CHAT, plain),
    "chat with usage": ("/v1/chat/completions", CHAT | {"stream_options": IDS | {"include_usage": True}}, plain),
    "chat with logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True}, plain),
    "chat with tools": ("/v1/chat/completions", CHAT | {"tools": TOOLS}, call),
    "chat with a stop text": ("/v1/chat/completions", CHAT | {"stop": ["ok"]}, stopped),
    "two choices": ("/v1/chat/completions", CHAT | {"n": 2}, two),
    "completion": ("/v1/completions", COMPLETION, plain),
    "echo with logprobs": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1}, plain),
}


def content(data: str) -> Any:
    """Return what an event says, without what each answer has of its own."""
    if data == "[DONE]":
        return data
    chunk = json.loads(data)
    chunk.pop("created")
    for choice in chunk["choices"]:
        for each in choice.get("delta", {}).get("tool_calls", ()):
            each.pop("id", None)
    return chunk


@pytest.mark.parametrize("case", CASES)
async def test_each_event_comes_once_wherever_the_stream_broke(api: Api, case: str) -> None:
    path, body, script = CASES[case]
    api.frontend.script = script
    whole = await events_of(api, path, body)
    marks = [place for place, (mark, _) in enumerate(whole) if mark]
    assert len(marks) >= 4
    for place in marks:
        rest = await events_of(api, path, body, last=whole[place][0])
        assert [content(data) for _, data in rest] == [content(data) for _, data in whole[place + 1 :]], place
        assert [mark for mark, _ in rest] == [mark for mark, _ in whole[place + 1 :]]
        first, again = api.frontend.requests[0], api.frontend.requests[-1]
        assert bool(again.new_parser) == bool(first.new_parser), "where stop texts are looked for"


async def test_the_request_and_what_the_client_has_are_asked_for(api: Api) -> None:
    api.frontend.script = two
    whole = await events_of(api, "/v1/chat/completions", CHAT | {"n": 2})
    last = [mark for mark, _ in whole if mark][-2]
    name = api.frontend.requests[0].request_id
    assert last == f"{name}:2e,2"
    await events_of(api, "/v1/chat/completions", CHAT | {"n": 2}, last)
    (asked,) = api.resumer.asked
    assert (asked.request_id, list(asked.output_tokens_received)) == (name, [2, 2])


@pytest.mark.parametrize(
    ("header", "changed", "words"),
    [
        ("nonsense", {}, "not an event id"),
        ("quire-1:", {}, "not an event id"),
        ("quire-1:" + ",".join(["1"] * 65), {}, "not an event id"),
        ("quire-1:1,2", {}, "2 choices, and the body asks for 1"),
        ("quire-1:1", {"stream": False, "stream_options": None}, "goes on with a stream"),
    ],
)
async def test_a_wrong_id_is_refused(api: Api, header: str, changed: Body, words: str) -> None:
    answer = await api.http.post("/v1/chat/completions", json=CHAT | changed, headers={"Last-Event-ID": header})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not api.resumer.asked


async def test_a_request_that_cannot_be_resumed_is_404(api: Api) -> None:
    api.resumer.refuses = NotFound("no request r1 of this caller can be resumed")
    answer = await api.http.post("/v1/completions", json=COMPLETION, headers={"Last-Event-ID": "r1:3"})
    assert answer.status_code == 404


async def test_an_answer_to_several_prompts_has_no_ids(api: Api) -> None:
    whole = await events_of(api, "/v1/completions", COMPLETION | {"prompt": ["a", "b"]})
    assert not any(mark for mark, _ in whole)
    answer = await api.http.post(
        "/v1/completions", json=COMPLETION | {"prompt": ["a", "b"]}, headers={"Last-Event-ID": "r1:3"}
    )
    assert answer.status_code == 400


async def test_events_have_no_ids_that_were_not_asked_for(api: Api) -> None:
    """Clients that read all of an event as its data fail at a line of another field."""
    api.frontend.script = plain
    found = await events_of(api, "/v1/chat/completions", CHAT | {"stream_options": None})
    assert {mark for mark, _ in found} == {""}
