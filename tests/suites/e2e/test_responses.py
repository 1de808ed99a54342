"""The Responses API of the official client on a real suite: stored in Redis, with rights for its own keys alone."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
import redis
from pydantic import BaseModel

from cli.demo_model.prompts import questions, system_text
from tests.support.suite import Suite, chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "checkpoint"
ASKED: dict[str, Any] = {"model": MODEL, "input": questions(1)[0].text, "instructions": system_text(), "temperature": 0}
TOOL: Any = {
    "type": "function",
    "name": "visit",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"kind": {"enum": ["town", "river"]}, "open": {"type": "boolean"}},
        "required": ["kind", "open"],
        "additionalProperties": False,
    },
}


class Place(BaseModel):
    """What an answer is to be."""

    kind: Literal["town", "river"]
    open: bool


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(suite: Suite) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{suite.stack.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_all_apis_say_the_same(suite: Suite, client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASKED, max_output_tokens=24)
    async with client.responses.stream(**ASKED, max_output_tokens=24) as stream:
        parts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    over_grpc = await suite.generate(chat(questions(1)[0].text, system_text(), max_tokens=24))
    assert whole.output_text == "".join(parts) == over_grpc.text
    assert parts
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 24


async def test_a_conversation_goes_on_from_redis_and_its_prefix_is_cached(
    suite: Suite, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(**ASKED, max_output_tokens=8)
    with redis.Redis.from_url(suite.stack.redis_url) as read:
        assert list(read.scan_iter(f"quire-responses:entry:*:{first.id}"))
    more = ASKED | {"input": "And then?", "previous_response_id": first.id}
    second = await client.responses.create(**more, max_output_tokens=8)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    await client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is not here"):
        await client.responses.create(**more, max_output_tokens=8)


async def test_a_schema_is_enforced(client: openai.AsyncOpenAI) -> None:
    """Demo model: text.format has the schema."""
    fields = ASKED | {"temperature": 1}
    answer = await client.responses.parse(**fields, text_format=Place, max_output_tokens=200)
    assert isinstance(answer.output_parsed, Place)


async def test_a_required_call_fits_its_schema(client: openai.AsyncOpenAI) -> None:
    """Demo model: tool_choice is required."""
    fields = ASKED | {"temperature": 1, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = await client.responses.create(**fields, max_output_tokens=200)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "visit"
    Place.model_validate(json.loads(call.arguments), strict=True)


async def test_a_background_response_is_read_later(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(**ASKED, max_output_tokens=24, background=True, stream=True)
    name, last = "", -1
    async for event in made:
        name, last = (event.response.id, last) if event.type == "response.created" else (name, last)
        last = event.sequence_number
        if event.type == "response.output_text.delta":
            break
    await made.close()
    rest = [event async for event in await client.responses.retrieve(name, stream=True, starting_after=last)]
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1].type in ("response.completed", "response.incomplete")
    whole = await client.responses.create(**ASKED, max_output_tokens=24)
    assert (await client.responses.retrieve(name)).output_text == whole.output_text


# A patch of lines, in the form of those that coding agents ask for.
PATCH = 'start: "*** Patch" LF line{1,3} "*** End"\nline: ("+" | "-") /.{0,9}/ LF -> line\n%import common.LF\n'
IS_PATCH = re.compile(r"\*\*\* Patch\n([+-][^\n]{0,9}\n){1,3}\*\*\* End")
WITH_PATCH: dict[str, Any] = ASKED | {
    "temperature": 1,
    "max_output_tokens": 200,
    "tools": [
        TOOL,
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}},
    ],
    "tool_choice": {"type": "custom", "name": "patch"},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_input_of_a_custom_tool_follows_its_grammar(client: openai.AsyncOpenAI, seed: int) -> None:
    """Demo model: tool_choice names the tool."""
    fields: dict[str, Any] = WITH_PATCH | {"extra_body": {"seed": seed}}
    (whole,) = (await client.responses.create(**fields)).output
    async with client.responses.stream(**fields) as stream:
        streamed = [event.input async for event in stream if event.type == "response.custom_tool_call_input.done"]
    assert whole.type == "custom_tool_call"
    assert IS_PATCH.fullmatch(whole.input)
    assert streamed == [whole.input]


async def test_a_grammar_that_cannot_be_enforced_is_refused_by_its_place(client: openai.AsyncOpenAI) -> None:
    wrong: Any = {"type": "grammar", "syntax": "lark", "definition": "start: /a(?=b)/"}
    with pytest.raises(openai.BadRequestError, match="has \\(\\?=b, a look-around") as caught:
        await client.responses.create(**ASKED, tools=[{"type": "custom", "name": "patch", "format": wrong}])
    assert caught.value.param == "tools[0].format.definition"
