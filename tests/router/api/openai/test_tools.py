"""Tools and reasoning in chats: the official client against a real server, with scripted outputs behind it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import openai.types.chat
import pytest
import pytest_asyncio
from pydantic import BaseModel

from common.contracts.types import ConstraintKind, FinishReason
from router.api.openai import schema as described
from router.contracts.events import ValidatedRequest
from tests.router.answers.dialects.walks import matcher, vocabulary
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import HI, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
STRICT: Any = {"type": "function", "function": ADD["function"] | {"strict": True}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 71}}\n</tool_call>'
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    """A model that writes calls as Hermes and Qwen do, and thoughts as Qwen3 does."""
    async with served_api(tools="hermes", reasoning="qwen3") as running:
        yield running


def says(*texts: str, reason: FinishReason = FinishReason.STOP) -> Any:
    """Return a script of one output in these pieces."""

    def script(request: ValidatedRequest) -> list[Step]:
        return [admitted(request), *map(tokens, texts), finished(len(texts), reason=reason)]

    return script


def in_pieces(text: str, size: int = 3) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


async def deltas_of(api: Api, **fields: Any) -> list[tuple[dict[str, Any], str | None]]:
    """Return the deltas of a stream as JSON has them, and the finish reason of each chunk."""
    body = {"messages": HI, "stream": True} | fields
    answer = await api.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for line in lines:
        for model in (openai.types.chat.ChatCompletionChunk, described.ChatChunk):
            model.model_validate_json(line, strict=True)
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [(choice["delta"], choice["finish_reason"]) for choice in choices]


async def whole(api: Api, **fields: Any) -> dict[str, Any]:
    """Return the choice of an answer, held strictly to the client's model and to ours."""
    answer = await api.http.post(CHAT, json={"messages": HI} | fields)
    assert answer.status_code == 200, answer.text
    for model in (openai.types.chat.ChatCompletion, described.ChatCompletion):
        model.model_validate_json(answer.content, strict=True)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def refusal(api: Api, **fields: Any) -> tuple[str, str]:
    """Return the parameter and the message with which a body is refused."""
    answer = await api.http.post(CHAT, json={"messages": HI} | fields)
    assert answer.status_code == 400, answer.text
    error = described.ErrorBody.model_validate_json(answer.content, strict=True).error
    return error.param or "", error.message


async def test_a_call_is_no_content(api: Api) -> None:
    api.frontend.script = says(*in_pieces(CALL))
    choice = await whole(api, tools=[ADD])
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    (call,) = message["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 71}


@pytest.mark.parametrize(("fields", "noted"), [({"tools": [ADD]}, True), ({}, False)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_shows_no_tools_is_noted_in_the_answer(
    api: Api, stream: bool, fields: dict[str, Any], noted: bool
) -> None:
    """The template of the demo model shows none."""
    api.frontend.script = says("Hi.")
    answer = await api.http.post(CHAT, json={"messages": HI, "stream": stream} | fields)
    note = "the chat template shows no tools, so the model does not see those of a request"
    assert answer.headers.get("x-quire-note") == (note if noted else None)


@pytest.mark.parametrize(("text", "content"), [("I add. END", "I add. "), ("I add. ENDEND", "I add. END")])
async def test_a_stop_text_in_the_words_beside_calls_ends_them(api: Api, text: str, content: str) -> None:
    def script(request: ValidatedRequest) -> list[Step]:
        assert request.new_parser is not None
        return [admitted(request), tokens(CALL), tokens(text), finished(9, stop="END")]

    api.frontend.script = script
    choice = await whole(api, tools=[ADD], stop=["END"])
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_a_stop_text_in_the_arguments_of_a_call_ends_nothing(api: Api) -> None:
    api.frontend.script = says("I add.", CALL)
    choice = await whole(api, tools=[ADD], stop=["71", "add"])
    assert choice["message"]["content"] == "I add."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 71}


async def test_a_call_that_the_limit_cuts_leaves_no_marks_as_content(api: Api) -> None:
    for end in (4, 12, 24):
        api.frontend.script = says("I add.", CALL[:end], reason=FinishReason.LENGTH)
        choice = await whole(api, tools=[ADD])
        assert (choice["message"]["content"], choice["finish_reason"]) == ("I add.", "length")


async def test_words_and_several_calls_keep_their_order(api: Api) -> None:
    api.frontend.script = says("I add.\n", CALL, "\n", CALL.replace("71", "72"))
    message = (await whole(api, tools=[ADD, NOW]))["message"]
    assert message["content"].strip() == "I add."
    assert [json.loads(call["function"]["arguments"])["a"] for call in message["tool_calls"]] == [71, 72]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_a_streamed_call_begins_with_its_name_and_its_arguments_follow(api: Api) -> None:
    api.frontend.script = says(*in_pieces(CALL))
    (opening, _), (begun, _), *rest, (last, reason) = await deltas_of(api, tools=[ADD])
    assert opening == {"role": "assistant", "content": None}
    (call,) = begun["tool_calls"]
    assert call.keys() == {"index", "id", "type", "function"}
    assert (call["index"], call["type"], call["function"]) == (0, "function", {"name": "add", "arguments": ""})
    pieces = [delta["tool_calls"][0] for delta, _ in rest]
    assert {tuple(piece) for piece in pieces} == {("index", "function")}
    assert len(pieces) > 1
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"a": 71}
    assert (last, reason) == ({}, "tool_calls")


async def test_the_client_puts_a_stream_together(api: Api) -> None:
    api.frontend.script = says("<think>", "hm", "</think>", "Well.", *in_pieces(CALL), "\n", *in_pieces(CALL))
    async with api.client.chat.completions.stream(model="demo", messages=HI, tools=[ADD]) as stream:
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"a": 71}'] * 2
    assert (message.content or "").strip() == "Well."
    assert message.model_dump()["reasoning_content"] == "hm"


async def test_the_clients_own_tools_are_parsed(api: Api) -> None:
    class Add(BaseModel):
        a: int

    api.frontend.script = says(CALL.replace('"add"', '"Add"'))
    tool = openai.pydantic_function_tool(Add)
    answer = await api.client.chat.completions.parse(model="demo", messages=HI, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Add(a=71)
    assert api.frontend.requests[0].sampling.constraint is not None  # the client makes it strict


async def test_a_call_that_was_cut_short_says_so(api: Api) -> None:
    api.frontend.script = says(CALL[:45], reason=FinishReason.LENGTH)
    choice = await whole(api, tools=[ADD])
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_a_named_tool_ends_as_openais_does(api: Api) -> None:
    api.frontend.script = says(CALL)
    choice = await whole(api, tools=[ADD, NOW], tool_choice={"type": "function", "function": {"name": "add"}})
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)
    constraint = api.frontend.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.GRAMMAR
    assert "now" not in constraint.text


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({"tools": [ADD]}, False),
        ({"tools": [ADD], "tool_choice": "auto"}, False),
        ({"tools": [ADD], "tool_choice": "none"}, False),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({"tools": [ADD, NOW], "tool_choice": "required"}, True),
        ({"tools": [ADD, STRICT | {"function": STRICT["function"] | {"name": "b"}}]}, True),
        ({"tools": [ADD], "parallel_tool_calls": False}, True),
        (
            {
                "tools": [ADD, NOW],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
                },
            },
            True,
        ),
    ],
)
async def test_what_must_hold_is_a_constraint(api: Api, fields: dict[str, Any], constrained: bool) -> None:
    await whole(api, **fields)
    assert (api.frontend.requests[0].sampling.constraint is not None) is constrained


async def test_without_a_choice_of_tools_their_marks_are_words(api: Api) -> None:
    api.frontend.script = says(CALL)
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        choice = await whole(api, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing; expected"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "is 'custom'; only function is offered"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name", "is missing; expected 1 to 64 letters"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "is 'a b'; expected 1 to 64 letters"),
        ({"tools": [ADD, ADD]}, "tools", "has two tools of the name 'add'; expected one"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type", "is 'array'; expected object",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": 7}}]},
            "tools[0].function.parameters", "must be a JSON schema; expected an object",
        ),
        ({"tools": [NOW] * 129}, "tools", "has 129 tools; expected at most 128"),
        (
            {"tools": [ADD, NOW], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice.function.name", "is 'sub', and no tool has that name; the tools are add, now",
        ),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice", "is 'always'; expected none, auto, required or"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools, and there is none"),
        ({"tools": [ADD], "allowed_token_ids": [7]}, "allowed_token_ids", "cannot be combined with tools, whose calls"),
        (
            {"tools": [ADD], "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema", "uses keywords that cannot be enforced",
        ),
        ({"tools": [ADD], "guided_regex": "[a-z]+"}, "guided_regex", "which allow only a JSON schema"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "is -1; expected 0 or more"),
        ({"tools": [ADD], "functions": [ADD["function"]]}, "functions", "cannot be combined with tools, its"),
        (
            {"tools": [STRICT | {"function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
            "tools", "uses keywords that cannot be enforced",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "has another meaning"),
        ({"chat_template_kwargs": {"n": 10**9}}, "chat_template_kwargs", "has a number beyond 1000000"),
        ({"chat_template_kwargs": dict.fromkeys(map("a{}".format, range(65)))}, "chat_template_kwargs", "has 65 vari"),
        ({"documents": [{"text": ""}] * 1025}, "documents", "has 1025 documents; expected at most 1024"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message", "contradicts add_generation_prompt",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[1].tool_calls[0].function", "is missing",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(api: Api, fields: dict[str, Any], param: str, what: str) -> None:
    found = await refusal(api, **fields)
    assert (found[0], what in found[1]) == (param, True), found
    assert not api.frontend.requests


@pytest.mark.parametrize(("choice", "may_answer"), [("auto", True), ("required", False)])
async def test_an_answer_that_calls_no_tool_has_the_form_that_was_asked_for(
    api: Api, choice: str, may_answer: bool
) -> None:
    await whole(api, tools=[NOW], tool_choice=choice, response_format=FORMAT)
    constraint = api.frontend.requests[0].sampling.constraint
    assert constraint is not None
    words = vocabulary([], False)

    def is_allowed(text: str) -> bool:
        at, tokens = matcher(words, constraint.text), words.encode(text)
        return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()

    assert is_allowed('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert is_allowed('{"a": 71}') is may_answer
    assert not is_allowed("It is late.")


async def test_a_thought_is_apart_from_the_answer(api: Api) -> None:
    api.frontend.script = says(*in_pieces("<think>\nTwo and two.\n</think>\n\nFour."))
    choice = await whole(api)
    thought = {"reasoning_content": "Two and two.", "reasoning": "Two and two."}
    assert choice["message"] == {"role": "assistant", "content": "Four.", "refusal": None} | thought
    deltas = [delta for delta, _ in await deltas_of(api)]
    for name in thought:
        assert "".join(delta.get(name) or "" for delta in deltas) == "Two and two."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."
    quiet = (await whole(api, include_reasoning=False))["message"]
    assert quiet == {"role": "assistant", "content": "Four.", "refusal": None} | dict.fromkeys(thought)


async def test_a_constraint_holds_for_the_answer_after_the_thought(api: Api) -> None:
    await whole(api, response_format=FORMAT)
    constraint = api.frontend.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.GRAMMAR
    bad: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    param, what = await refusal(api, response_format=bad)
    assert (param, "cannot be enforced" in what) == ("response_format.json_schema.schema", True)
    param, what = await refusal(api, guided_json="{")
    assert (param, "cannot be enforced" in what) == ("guided_json", True)


async def test_beside_a_form_an_answer_is_a_call_or_a_document(api: Api) -> None:
    fields: dict[str, Any] = {"tools": [ADD], "response_format": FORMAT}
    document = '{"a": 71, "b": "<tool_call>{}</tool_call>"}'
    for text, expected in ((CALL, (None, "tool_calls")), (document, (document, "stop"))):
        api.frontend.script = says(*in_pieces(f"<think>hm</think>\n\n{text}"))
        choice = await whole(api, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == expected
    constraint = api.frontend.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.GRAMMAR
    assert "%json" in constraint.text
    assert "<tool_call>" in constraint.text


async def test_where_a_call_is_required_no_form_is(api: Api) -> None:
    await whole(api, tools=[ADD], tool_choice="required")
    await whole(api, tools=[ADD], tool_choice="required", response_format=FORMAT)
    plain, beside = [request.sampling.constraint for request in api.frontend.requests]
    assert plain == beside


async def test_a_budget_of_thoughts_reaches_the_worker_with_the_marks_of_the_dialect(api: Api) -> None:
    await whole(api, thinking_token_budget=7)
    thought = api.frontend.requests[0].sampling.thought
    assert thought is not None
    assert (thought.max_tokens, thought.opener, thought.closer) == (7, "<think>", "</think>")
    assert api.text.decode(thought.end_token_ids) == "\n</think>\n\n"
    assert (thought.is_open, thought.anywhere) == (False, False)
    await whole(api)
    assert api.frontend.requests[1].sampling.thought is None


async def test_usage_has_the_tokens_of_the_thought(api: Api) -> None:
    api.frontend.script = says("<think>", "a ", "b ", "c", "</think>", "Four.")
    for fields in ({}, {"include_reasoning": False}):
        answer = await api.http.post(CHAT, json={"messages": HI, **fields})
        assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}, answer.text


async def test_special_tokens_that_mark_calls_and_thoughts_stay(api: Api) -> None:
    await whole(api, tools=[ADD])
    await whole(api)
    with_tools, without = [set(request.kept_special_tokens) for request in api.frontend.requests]
    assert without < with_tools
    assert {"<think>", "<tool_call>"} <= with_tools


async def test_functions_are_the_older_form_of_tools(api: Api) -> None:
    api.frontend.script = says(CALL)
    fields: dict[str, Any] = {"functions": [ADD["function"]]}
    choice = await whole(api, **fields)
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 71}'}
    assert ("tool_calls" in choice["message"], choice["finish_reason"]) == (False, "function_call")
    assert (await whole(api, **fields, function_call={"name": "add"}))["finish_reason"] == "stop"
    named = [delta["function_call"] for delta, _ in await deltas_of(api, **fields) if "function_call" in delta]
    assert named[0] == {"name": "add", "arguments": ""}
    assert json.loads("".join(each["arguments"] for each in named)) == {"a": 71}


async def test_a_conversation_with_calls_goes_on(api: Api) -> None:
    api.frontend.script = says(CALL)
    first = await api.client.chat.completions.create(model="demo", messages=HI, tools=[ADD])
    message = first.choices[0].message
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "142"}
    await api.client.chat.completions.create(model="demo", messages=[*HI, message, result], tools=[ADD])  # type: ignore[list-item]
    rendered = api.text.decode(api.frontend.requests[1].prompt, skip_special_tokens=False)
    assert "<|tool|> 142<|end|>" in rendered


async def test_an_answer_continues_the_last_message(api: Api) -> None:
    messages: Any = [*HI, {"role": "assistant", "content": "The town is"}]
    await whole(api, messages=messages, continue_final_message=True)
    await whole(api, messages=messages, add_generation_prompt=False)
    texts = [api.text.decode(request.prompt, skip_special_tokens=False) for request in api.frontend.requests]
    assert texts[0].endswith("<|assistant|> The town is")
    assert texts[1].endswith("<|assistant|> The town is<|end|>")


async def test_tokenize_counts_what_a_chat_is_charged(api: Api) -> None:
    fields: dict[str, Any] = {
        "messages": [*HI, {"role": "assistant", "content": "The"}], "continue_final_message": True, "tools": [ADD],
    }  # fmt: skip
    counted: httpx.Response = await api.http.post("/tokenize", json=fields)
    await whole(api, **fields)
    assert tuple(counted.json()["tokens"]) == api.frontend.requests[0].prompt
    refused = await api.http.post("/tokenize", json=fields | {"tools": [ADD, ADD]})
    assert refused.json()["error"]["param"] == "tools"
