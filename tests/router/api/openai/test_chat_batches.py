"""/v1/chat/completions/batch over a frontend that plays scripts: a choice for each conversation."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.limits import MAX_HTTP_SEQUENCES
from router.api.openai.schema import ChatCompletion
from router.contracts.events import ValidatedRequest
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.http_harness import HI, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

BYE = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Bye"}]


async def post(api: Api, **body: Any) -> tuple[int, Any]:
    answer = await api.http.post("/v1/chat/completions/batch", json={"messages": [HI, BYE]} | body)
    return answer.status_code, answer.json()


def of_its_length(request: ValidatedRequest) -> list[Any]:
    """Say how many tokens the prompt has."""
    return [admitted(request, cached=1), tokens(str(len(request.prompt))), finished(2, cached=1)]


async def test_each_conversation_gets_the_choice_of_its_place(api: Api) -> None:
    api.frontend.script = of_its_length
    status, body = await post(api, model="demo", temperature=0.5, seed=3, max_tokens=9, return_token_ids=True)
    answer = ChatCompletion.model_validate(body)
    lengths = [len(request.prompt) for request in api.frontend.requests]
    assert (status, len(set(lengths))) == (200, 2)
    assert [(each.index, each.message.content) for each in answer.choices] == [
        (0, str(lengths[0])), (1, str(lengths[1])),
    ]  # fmt: skip
    assert [each.token_ids for each in answer.choices] == [[7], [7]]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(lengths), 4)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    first, second = api.frontend.requests
    assert (first.sampling, first.sampling.max_tokens) == (second.sampling, 9)
    assert (first.request_id or "")[:-2] == (second.request_id or "")[:-2] == answer.id.removeprefix("chatcmpl-")


async def test_a_conversation_is_answered_as_it_would_be_alone(api: Api) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}
    await post(api, **form, logprobs=True, top_logprobs=2)
    alone = await api.http.post(
        "/v1/chat/completions", json={"messages": BYE, "logprobs": True, "top_logprobs": 2} | form
    )
    assert alone.status_code == 200
    _, second, third = api.frontend.requests
    assert (second.prompt, second.sampling) == (third.prompt, third.sampling)
    assert second.sampling.constraint is not None


async def test_thoughts_of_each_are_read() -> None:
    async with served_api(reasoning="deepseek_r1") as api:
        api.frontend.script = lambda request: [
            admitted(request), tokens(f"<think>hm</think>{len(request.prompt)}"), finished(2),
        ]  # fmt: skip
        _, body = await post(api)
        lengths = [str(len(request.prompt)) for request in api.frontend.requests]
        found = [(each["message"]["reasoning_content"], each["message"]["content"]) for each in body["choices"]]
        assert found == [("hm", lengths[0]), ("hm", lengths[1])]


async def test_the_first_conversation_that_fails_ends_all(api: Api) -> None:
    refused = Overloaded(QuotaViolation("router.queue", "full"), 1.0)
    api.frontend.script = lambda request: [refused] if len(api.frontend.requests) == 2 else of_its_length(request)
    status, body = await post(api)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert api.frontend.ended == len(api.frontend.requests)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "has 0 conversations; expected 1 to 128"),
        ({"messages": [HI] * (MAX_HTTP_SEQUENCES + 1)}, "messages", "has 129 conversations"),
        ({"messages": HI}, "messages[0]", "list"),
        ({"messages": [HI, []]}, "messages[1]", "is empty; expected at least one message"),
        ({"messages": [HI, [{"role": "no role!", "content": "a"}]]}, "messages[1][0].role", "expected"),
        (
            {"messages": [HI, [{"role": "user", "content": [{"type": "smell"}]}]]},
            None,
            "conversation 1: messages[0]",
        ),
        (
            {"messages": [HI, [{"role": "assistant", "tool_calls": [{"type": "a", "function": {"name": "b"}}]}]]},
            "messages[1][0].tool_calls[0].type",
            "only function is offered",
        ),
        ({"stream": True}, "stream", "not offered for several conversations"),
        ({"n": 2}, "n", "not offered for several conversations"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools", "not offered for several"),
        ({"use_beam_search": True}, "use_beam_search", "not offered"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not offered for several conversations"),
        ({"continue_final_message": True}, "continue_final_message", "not offered for several conversations"),
        ({"model": "other"}, None, "'other' is not served here"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, fields: dict[str, Any], param: str | None, words: str) -> None:
    status, body = await post(api, **fields)
    error = body["error"]
    assert (status in (400, 404), error["param"], words in error["message"]) == (True, param, True), error
    assert api.frontend.requests == []
