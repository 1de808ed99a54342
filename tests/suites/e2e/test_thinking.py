"""Thoughts that a budget ends, on a real suite: over a kill of the worker, preemptions, and constraints after it.

The demo model never ends a thought that its template opens. Two workers with few blocks serve.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from tests.support.load import manager_stopped, prompts, until_all_wait, with_a_worker_killed
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (CHECKPOINT / "chat_template.jinja").read_text()
THINKING = TEMPLATE.replace(
    "<|assistant|>",
    "<|assistant|>{% if enable_thinking is undefined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}",
)
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Lyon"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["town", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "visit", "parameters": SCHEMA, "strict": True}}
HI = [{"role": "user", "content": "Where does Anna live?"}]
COUNT, WORKERS = 96, 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    folder = tmp_path_factory.mktemp("thinking")
    (folder / "template.jinja").write_text(THINKING)
    flags = ("--chat-template", str(folder / "template.jinja"))
    worker = ("--kv-blocks", "80", "--dtype", "float32")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=worker, router_flags=flags)
    async with running_suite(folder / "suite", options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(thinking: Suite) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=thinking.stack.http_url, timeout=PATIENCE) as client:
        yield client


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={"messages": HI, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def tokens(http: httpx.AsyncClient, text: str) -> list[int]:
    answer = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    ids: list[int] = answer.json()["tokens"]
    return ids


async def test_a_thought_ends_with_its_budget_and_the_answer_follows(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    free = (await chat(http, **fields))["choices"][0]
    assert "content" not in free["message"] or not free["message"]["content"], "the model ends no thought itself"
    for budget in (0, 1, 9):
        body = await chat(http, **fields, thinking_token_budget=budget)
        choice, end = body["choices"][0], await tokens(http, "\n</think>\n\n")
        assert choice["token_ids"][:budget] == free["token_ids"][:budget]
        assert choice["token_ids"][budget : budget + len(end)] == end
        assert choice["message"]["content"]
        thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert (thought > 0, thought <= budget + len(end)) == (budget > 0, True)


async def test_where_the_template_opens_no_thought_a_budget_changes_nothing(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 3, "chat_template_kwargs": {"enable_thinking": False}}
    free, bounded = await chat(http, **fields), await chat(http, **fields, thinking_token_budget=2)
    assert bounded["choices"][0]["token_ids"] == free["choices"][0]["token_ids"]
    assert bounded["choices"][0]["message"]["content"]


async def test_messages_have_the_same_budget(http: httpx.AsyncClient) -> None:
    thinking = {"type": "enabled", "budget_tokens": 6}
    body = {"model": "checkpoint", "messages": HI, "max_tokens": 40, "thinking": thinking, "temperature": 0}
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    same = await chat(http, temperature=0, max_tokens=40, thinking_token_budget=6)
    assert answer.json()["content"][0]["thinking"] == same["choices"][0]["message"]["reasoning_content"]


async def test_a_form_holds_after_the_end_that_was_forced(http: httpx.AsyncClient) -> None:
    for seed in range(3):
        body = await chat(http, response_format=FORMAT, thinking_token_budget=7, max_tokens=200, seed=seed)
        message = body["choices"][0]["message"]
        assert message["reasoning_content"]
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


async def test_a_required_call_holds_after_the_end_that_was_forced(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    body = await chat(http, **fields, thinking_token_budget=7, max_tokens=200, seed=1)
    (call,) = body["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert body["choices"][0]["message"]["reasoning_content"]


async def test_beside_tools_a_form_holds_unless_a_tool_is_called(http: httpx.AsyncClient) -> None:
    for seed in range(6):
        fields: dict[str, Any] = {"tools": [TOOL], "response_format": FORMAT, "thinking_token_budget": 3}
        body = await chat(http, **fields, max_tokens=300, seed=seed)
        message = body["choices"][0]["message"]
        if calls := message.get("tool_calls"):
            for call in calls:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        else:
            jsonschema.validate(json.loads(message["content"]), SCHEMA)


def bounded(place: int, prompt: list[int]) -> pb.GenerateRequest:
    """Return a request whose thought ends after a number of tokens of its own."""
    request = greedy(prompt, COUNT)
    request.thought_budget.CopyFrom(
        types_pb2.ThoughtBudget(
            max_tokens=5 * place, opener="<think>", closer="</think>", end="\n</think>\n\n", is_open=True
        )
    )
    return request


def outputs(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.tokens for outcome in outcomes]


async def test_a_killed_worker_does_not_change_where_thoughts_end(thinking: Suite) -> None:
    requests = [bounded(place, prompt) for place, prompt in enumerate(prompts(8, seed=4))]
    alone = [await thinking.generate(request) for request in requests]
    _, disturbed = await with_a_worker_killed(thinking, requests)
    assert outputs(disturbed) == outputs(alone)
    await thinking.until_all_free(WORKERS)


async def all_at_once(suite: Suite, requests: list[pb.GenerateRequest]) -> list[Outcome]:
    """Return the outcomes of requests that begin in one moment, however fast the machine is."""
    async with manager_stopped(suite):
        tasks = [asyncio.create_task(suite.generate(request)) for request in requests]
        await until_all_wait(suite, len(requests))
    return await asyncio.gather(*tasks)


async def test_preemptions_do_not_change_where_thoughts_end(thinking: Suite) -> None:
    """How many sequences each worker gets varies, and with it how many are preempted: so they may begin again."""
    await thinking.until_connected(WORKERS)
    requests = [bounded(place % 18, prompt) for place, prompt in enumerate(prompts(24, seed=5))]
    alone = [await thinking.generate(request) for request in requests]
    preemptions = 0
    async with asyncio.timeout(2 * PATIENCE):
        while not preemptions:
            together = await all_at_once(thinking, requests)
            assert outputs(together) == outputs(alone)
            preemptions = sum(outcome.finished.usage.preemptions for outcome in together if outcome.finished)
    await thinking.until_all_free(WORKERS)
