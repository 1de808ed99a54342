"""Tools on a real suite: what must be called is called, parses and fits its schema, however weak the model is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field

from tests.suites.e2e.conftest import WORKERS
from tests.support.suite import PATIENCE, Suite, chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "checkpoint"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where does Anna live?"}]


class FindTown(BaseModel):
    """Finds a town."""

    model_config = ConfigDict(extra="forbid")

    river: Literal["Rhine", "Rhône"]
    bridges: Annotated[int, Field(ge=0, le=99)]
    names: Annotated[list[Literal["Lyon", "Basel"]], Field(max_length=2)]


class Now(BaseModel):
    """Returns the time."""

    model_config = ConfigDict(extra="forbid")


KINDS: dict[str, type[BaseModel]] = {"FindTown": FindTown, "Now": Now}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": kind.model_json_schema()}}
    for name, kind in KINDS.items()
]
REQUIRED: dict[str, Any] = {
    "model": MODEL, "messages": HI, "tools": TOOLS, "tool_choice": "required", "temperature": 1, "max_tokens": 400,
}  # fmt: skip


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(suite: Suite) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{suite.stack.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        KINDS[call.function.name].model_validate_json(call.function.arguments)


async def test_required_calls_parse_and_fit_their_schemas(suite: Suite, client: openai.AsyncOpenAI) -> None:
    """Demo model: tool_choice is required."""
    answer = await client.chat.completions.create(**REQUIRED, n=4, seed=3, parallel_tool_calls=False)
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        check_calls(choice.message.tool_calls)
    await suite.until_all_free(WORKERS)


async def test_streamed_calls_are_those_of_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    """Demo model: tool_choice is required."""
    fields: dict[str, Any] = REQUIRED | {"seed": 5, "parallel_tool_calls": False}
    async with client.chat.completions.stream(**fields) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    whole = (await client.chat.completions.create(**fields)).choices[0]
    check_calls(streamed.message.tool_calls)
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    functions = [
        [json.loads(call.function.arguments) for call in choice.message.tool_calls or []]
        for choice in (streamed, whole)
    ]
    assert functions[0] == functions[1]


async def test_a_named_tool_is_the_one_that_is_called(client: openai.AsyncOpenAI) -> None:
    """Demo model: tool_choice names the tool."""
    fields = REQUIRED | {"tool_choice": {"type": "function", "function": {"name": "FindTown"}}}
    answer = await client.chat.completions.create(**fields, n=3, seed=8)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert [call.function.name for call in choice.message.tool_calls or []] == ["FindTown"]
        check_calls(choice.message.tool_calls)


async def test_the_clients_own_tools_come_back_parsed(client: openai.AsyncOpenAI) -> None:
    """Demo model: tool_choice is required."""
    tool = openai.pydantic_function_tool(FindTown)
    answer = await client.chat.completions.parse(
        model=MODEL, messages=HI, tools=[tool], tool_choice="required", temperature=1, seed=2, max_tokens=400
    )
    for call in answer.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, FindTown)


async def test_the_result_of_a_call_is_answered(client: openai.AsyncOpenAI) -> None:
    """Demo model: tool_choice is required, then none."""
    first = await client.chat.completions.create(**REQUIRED, seed=3, parallel_tool_calls=False)
    message: Any = first.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Anna lives in Lyon."}
    answer = await client.chat.completions.create(
        model=MODEL, messages=[*HI, message, result], tools=TOOLS, tool_choice="none", max_tokens=16
    )
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.tool_calls is None


async def test_a_tool_that_cannot_be_enforced_costs_no_block(suite: Suite, client: openai.AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**(REQUIRED | {"tools": tools}))
    assert caught.value.param == "tools"
    await suite.until_all_free(WORKERS)


async def test_special_tokens_stay_where_grpc_asks_for_them(suite: Suite) -> None:
    request = chat("Where does Anna live?", max_tokens=48)
    request.sampling.ignore_eos = True
    plain = await suite.generate(request)
    request.kept_special_tokens.append("<|end|>")
    kept = await suite.generate(request)
    assert plain.tokens == kept.tokens
    assert kept.text.replace("<|end|>", "") == plain.text
    assert "<|end|>" in kept.text
