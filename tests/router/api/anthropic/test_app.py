"""The Messages API on a real server, with a scripted frontend behind it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from common.contracts import limits
from common.contracts.errors import Overloaded, QuireError, QuotaViolation, RateLimited, Unauthenticated, Unavailable
from common.contracts.types import FinishReason
from router.api.anthropic.app import AnswerMessage, MessageEvent, MessagesError, TokenCount
from router.tenants.tenancy import ANYONE, Caller
from tests.support.router.fake_frontend import TRACE_ID, admitted, finished, tokens
from tests.support.router.http_harness import DEADLINE_S, FACTS, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def post(api: Api, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    return await api.http.post(path, json={"messages": HI, "max_tokens": 50} | fields)


async def asked(api: Api, **fields: Any) -> AnswerMessage:
    answer = await post(api, **fields)
    assert answer.status_code == 200, answer.text
    return AnswerMessage.model_validate(answer.json())


async def streamed(api: Api, **fields: Any) -> list[MessageEvent]:
    answer = await post(api, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [MessageEvent.model_validate_json(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]


def says(api: Api, *texts: str, reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> None:
    """Let the frontend answer with these texts."""
    pieces = [tokens(text) for text in texts]
    api.frontend.script = lambda request: [
        admitted(request, 2),
        *pieces,
        finished(9, reason=reason, stop=stop, cached=2),
    ]


async def test_a_whole_answer(api: Api) -> None:
    says(api, "Hel", "lo")
    raw = await post(api, system="Be brief.", temperature=0.5, top_k=3, stop_sequences=["END"])
    answer = AnswerMessage.model_validate(raw.json())
    assert (answer.model, answer.stop_reason, answer.stop_sequence) == ("demo", "end_turn", None)
    assert answer.id == f"msg_{raw.headers['x-quire-request-id']}"
    assert [block.model_dump() for block in answer.content] == [{"type": "text", "text": "Hello", "citations": None}]
    (request,) = api.frontend.requests
    rendered = api.text.decode(request.prompt, skip_special_tokens=False)
    assert rendered == "<|bos|><|system|> Be brief.<|end|><|user|> Hi<|end|><|assistant|>"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (50, 0.5, 3, ("END",))
    assert answer.usage.model_dump() == {
        "input_tokens": len(request.prompt) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 9,
    }
    assert (raw.headers["request-id"], raw.headers["x-trace-id"]) == (raw.headers["x-request-id"], TRACE_ID)


async def test_a_thought_and_a_call(api: Api) -> None:
    says(api, "<think>Hm", ".</think>I add.", CALL)
    answer = await asked(api, tools=[ADD])
    thought, text, call = [block.model_dump() for block in answer.content]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert text["text"] == "I add."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert call["id"].startswith("toolu_")
    assert answer.stop_reason == "tool_use"


async def test_a_forced_call_is_a_constraint(api: Api) -> None:
    says(api, CALL)
    answer = await asked(api, tools=[ADD], tool_choice={"type": "tool", "name": "add"})
    assert answer.stop_reason == "tool_use"
    assert api.frontend.requests[0].sampling.constraint is not None


async def test_a_stream_has_typed_events(api: Api) -> None:
    says(api, "<think>Hm.</think>", CALL)
    events = await streamed(api, tools=[ADD])
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1]
    assert events[0].message is not None
    assert events[0].message.usage.cache_read_input_tokens == 2
    deltas = [event.delta or {} for event in events if event.type == "content_block_delta"]
    assert "".join(each.get("thinking", "") for each in deltas) == "Hm."
    assert json.loads("".join(each.get("partial_json", "") for each in deltas)) == {"a": 1}
    assert events[-2].delta == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2].usage is not None
    assert events[-2].usage.output_tokens == 9


async def test_text_is_streamed_as_it_comes(api: Api) -> None:
    go_on = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("Hello"), go_on, tokens("!"), finished(2)]
    body = {"messages": HI, "max_tokens": 5, "stream": True}
    async with api.http.stream("POST", "/v1/messages", json=body) as answer:
        async for line in answer.aiter_lines():
            if "Hello" in line:
                assert not go_on.is_set()
                go_on.set()
    assert go_on.is_set()


async def test_silence_is_filled_with_pings(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_SILENCE_SECONDS", 0.001)
    go_on = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), go_on, tokens("Hello"), finished(2)]
    body = {"messages": HI, "max_tokens": 5, "stream": True}
    async with api.http.stream("POST", "/v1/messages", json=body) as answer:
        async for line in answer.aiter_lines():
            if line == "event: ping":
                go_on.set()
    assert go_on.is_set()


async def test_a_stop_sequence_and_the_last_token(api: Api) -> None:
    says(api, "a", stop="END")
    answer = await asked(api, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    says(api, "a", reason=FinishReason.LENGTH)
    assert (await asked(api)).stop_reason == "max_tokens"


async def test_more_tokens_than_the_context_holds_are_lowered(api: Api) -> None:
    says(api, "a", reason=FinishReason.LENGTH)
    answer = await asked(api, max_tokens=1_000_000)
    assert answer.stop_reason == "model_context_window_exceeded"
    (request,) = api.frontend.requests
    assert request.max_len == FACTS.max_model_len


async def test_what_an_agent_always_sends_is_served(api: Api) -> None:
    """Marks for the cache name messages, more tokens are asked for than the context has, and an effort is a hint."""
    mark = {"cache_control": {"type": "ephemeral"}}
    says(api, "a")
    answer = await asked(
        api,
        system=[{"type": "text", "text": "Be brief.", **mark}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", **mark}]}],
        max_tokens=32_000,
        output_config={"effort": "high"},
        thinking={"type": "adaptive"},
        tools=[ADD | mark],
    )
    assert answer.stop_reason == "end_turn"
    (request,) = api.frontend.requests
    assert (request.max_len, len(request.retention)) == (FACTS.max_model_len, 1)


async def test_tokens_are_counted_as_a_request_has_them(api: Api) -> None:
    given: dict[str, Any] = {"system": "Be brief.", "tools": [ADD]}
    answer = await api.http.post("/v1/messages/count_tokens", json={"model": "demo", "messages": HI, **given})
    counted = TokenCount.model_validate(answer.json()).input_tokens
    await asked(api, **given)
    assert counted == len(api.frontend.requests[0].prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded(QuotaViolation("router.queue", "1024 of 1024"), 1.5), 529, "overloaded_error"),
        (RateLimited(QuotaViolation("tenant a.rpm", "60 of 60"), 1.5), 429, "rate_limit_error"),
        (Unavailable("no worker", 0.25), 529, "overloaded_error"),
        (QuireError("broken"), 500, "api_error"),
    ],
)
async def test_a_refusal_has_its_type_and_status(
    api: Api, error: QuireError, status: int, kind: str, stream: bool
) -> None:
    api.frontend.script = lambda request: [error]
    answer = await post(api, stream=stream)
    assert answer.status_code == status
    assert answer.json() == {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert ("retry-after" in answer.headers) == (status != 500)
    dropped = "rejected-saturated" if isinstance(error, Overloaded) and not isinstance(error, RateLimited) else None
    assert answer.headers.get("x-llm-d-request-dropped-reason") == dropped


async def test_an_error_in_mid_stream_is_an_event(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), Unavailable("the worker is gone")]
    last = (await streamed(api))[-1]
    assert last.error is not None
    assert (last.type, last.error.type, last.error.message) == ("error", "overloaded_error", "the worker is gone")


@pytest.mark.parametrize(
    ("fields", "status", "kind", "what"),
    [
        ({"model": "claude-9"}, 404, "not_found_error", "model 'claude-9' is not served here; 'demo' is"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: "),
        ({"top_p": 2}, 400, "invalid_request_error", "top_p: is 2; expected"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]: is empty"),
        ({"messages": []}, 400, "invalid_request_error", "messages: is empty; expected at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell", "source": {}}]}]},
            400, "invalid_request_error", "messages[0].content[0].type: 'smell' is not offered",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 5000}]},
            400, "invalid_request_error", "prompt is too long: ",
        ),
    ],
)  # fmt: skip
async def test_a_wrong_body_is_refused_in_its_words(
    api: Api, fields: dict[str, Any], status: int, kind: str, what: str
) -> None:
    answer = await post(api, **fields)
    found = MessagesError.model_validate(answer.json()).error
    assert (answer.status_code, found.type) == (status, kind)
    assert found.message.startswith(what)
    assert not api.frontend.requests


async def test_what_never_reaches_the_routes_is_refused_in_their_form(api: Api) -> None:
    nothing = await api.http.post("/v1/messages/batches", json={})
    no_json = await api.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    too_deep = await api.http.post("/v1/messages", content=b"[" * 999, headers={"content-type": "application/json"})
    found = [(each.status_code, each.json()["error"]["type"]) for each in (nothing, no_json, too_deep)]
    assert found == [(404, "not_found_error"), (400, "invalid_request_error"), (400, "invalid_request_error")]
    assert (await api.http.post("/v1/nothing")).json()["error"]["code"] == "unknown_url"


async def test_a_client_that_goes_away_ends_its_request(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), asyncio.Event()]
    asking = asyncio.create_task(post(api))
    await asyncio.wait_for(api.frontend.reached.wait(), DEADLINE_S)
    asking.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), DEADLINE_S)


async def test_the_routes_are_described(api: Api) -> None:
    described = (await api.http.get("/openapi.json")).json()
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= described["paths"].keys()
    assert {"MessageEvent", "AnswerMessage", "MessagesError"} <= described["components"]["schemas"].keys()


class OneKey:
    """Knows one key."""

    def caller(self, authorization: str, host: str) -> Caller:
        if authorization != "Bearer right":
            raise Unauthenticated("the key is not known here")
        return ANYONE

    def is_live(self, caller: Caller) -> bool:
        return True


async def test_a_key_may_come_in_either_header() -> None:
    async with served_api(OneKey()) as api:
        headers = [{"x-api-key": "right"}, {"authorization": "Bearer right"}, {"x-api-key": "wrong"}, {}]
        body = {"messages": HI, "max_tokens": 5}
        answers = [await api.http.post("/v1/messages", json=body, headers=each) for each in headers]
    assert [each.status_code for each in answers] == [200, 200, 401, 401]
    assert answers[2].json()["error"] == {"type": "authentication_error", "message": "the key is not known here"}
