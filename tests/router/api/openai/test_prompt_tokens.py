"""Fields that evaluations send about tokens: which ones a prompt has, and which ones the text shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.contracts.types import Constraint, ConstraintKind, SamplingParams
from quire.inference.v1 import inference_pb2 as pb
from router.api.openai.schema import ChatChunk, ChatCompletion, Completion, CompletionChunk
from tests.support.router.fake_frontend import admitted, finished
from tests.support.router.http_harness import FACTS, HI, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT, END = FACTS.max_model_len, FACTS.eos_token_ids[0]


async def post(api: Api, path: str, **fields: Any) -> Any:
    answer = await api.http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chunks(api: Api, path: str, **fields: Any) -> list[Any]:
    answer = await api.http.post(path, json={"stream": True, **fields})
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


async def test_a_completion_gives_the_tokens_of_each_prompt_once(api: Api) -> None:
    prompts = [await api.encode("a b"), await api.encode("c")]
    fields: dict[str, Any] = {"prompt": prompts, "n": 2, "return_token_ids": True}
    api.frontend.script = lambda request: [admitted(request), finished(0, index=0), finished(0, index=1)]
    whole = await post(api, COMPLETIONS, **fields)
    Completion.model_validate(whole, strict=True)
    found = [choice.get("prompt_token_ids") for choice in whole["choices"]]
    assert found == [prompts[0], None, prompts[1], None]
    streamed = await chunks(api, COMPLETIONS, **fields)
    for each in streamed:
        CompletionChunk.model_validate(each, strict=True)
    choices = [choice for each in streamed for choice in each["choices"] if "prompt_token_ids" in choice]
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in choices] == [(0, prompts[0]), (2, prompts[1])]


async def test_a_chat_gives_the_tokens_of_its_prompt_beside_its_choices(api: Api) -> None:
    whole = await post(api, CHAT, messages=HI, return_token_ids=True)
    ChatCompletion.model_validate(whole, strict=True)
    prompt = list(api.frontend.requests[0].prompt)
    assert whole["prompt_token_ids"] == prompt
    streamed = await chunks(api, CHAT, messages=HI, return_token_ids=True)
    for each in streamed:
        ChatChunk.model_validate(each, strict=True)
    assert [each.get("prompt_token_ids") for each in streamed] == [prompt, *[None] * (len(streamed) - 1)]


async def test_prompts_have_no_tokens_in_answers_that_did_not_ask(api: Api) -> None:
    (choice,) = (await post(api, COMPLETIONS, prompt="a"))["choices"]
    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    chat = await post(api, CHAT, messages=HI)
    assert [chat[name] for name in ("prompt_token_ids", "prompt_logprobs")] == [None] * 2
    assert "prompt_token_ids" not in str(await chunks(api, CHAT, messages=HI))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": CONTEXT}, 20),
        ({"truncate_prompt_tokens": -1}, 20),
        ({}, 20),
    ],
)
async def test_the_last_tokens_of_a_prompt_are_kept(api: Api, fields: dict[str, int], kept: int) -> None:
    ids = list(range(10, 30))
    whole = await post(api, COMPLETIONS, prompt=ids, echo=True, **fields)
    assert api.frontend.requests[0].prompt == tuple(ids[-kept:])
    assert whole["choices"][0]["text"] == api.text.decode(ids[-kept:]) + "Hello world"
    assert whole["usage"]["prompt_tokens"] == kept


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_side_that_is_cut_is_the_clients(api: Api, path: str) -> None:
    given: dict[str, Any] = {"prompt": "a b c d e f g h", "messages": HI}
    await post(api, path, **given)
    whole = api.frontend.requests[0].prompt
    for side, kept in (("left", whole[-5:]), ("right", whole[:5]), (None, whole[-5:])):
        await post(api, path, **given, truncate_prompt_tokens=5, truncation_side=side)
        assert api.frontend.requests[-1].prompt == kept
    answer = await api.http.post(path, json=given | {"truncation_side": "top"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncation_side")


async def test_minus_one_leaves_room_for_the_output(api: Api) -> None:
    await post(api, COMPLETIONS, prompt="word " * CONTEXT, max_tokens=100, truncate_prompt_tokens=-1)
    await post(api, CHAT, messages=[{"role": "user", "content": "word " * CONTEXT}], truncate_prompt_tokens=-1)
    assert [len(request.prompt) for request in api.frontend.requests] == [CONTEXT - 100, CONTEXT - 1]


@pytest.mark.parametrize("wrong", [0, -2])
async def test_no_token_cannot_be_kept(api: Api, wrong: int) -> None:
    answer = await api.http.post(COMPLETIONS, json={"prompt": "a", "truncate_prompt_tokens": wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_tokens_around_a_text_are_added_unless_the_client_does_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, added = api.text.encode, list[bool]()

    async def noted(prompt: pb.Prompt, add_special_tokens: bool = True) -> list[int]:
        added.append(add_special_tokens)
        return await encode(prompt, add_special_tokens)

    monkeypatch.setattr(api.text, "encode", noted)  # the demo model's tokenizer puts nothing around a text
    for special in (None, True, False):
        await post(api, COMPLETIONS, prompt="Lyon is", add_special_tokens=special)
    assert added == [True, True, False]
    answer = await api.http.post(CHAT, json={"messages": HI, "add_special_tokens": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_special_tokens")


@pytest.mark.parametrize(
    ("ids", "grammar", "biases"),
    [
        ([7], "start: <[7]>*", {END: -100.0}),
        ([9, 7, 8, 7, 20], "start: <[7-9,20]>*", {END: -100.0}),
        ([7, END], f"start: <[{END},7]>*", {}),
    ],
)
async def test_only_allowed_tokens_are_sampled_and_only_they_end_the_text(
    api: Api, ids: list[int], grammar: str, biases: dict[int, float]
) -> None:
    await post(api, COMPLETIONS, prompt="a", allowed_token_ids=ids)
    await post(api, CHAT, messages=HI, allowed_token_ids=ids)
    for request in api.frontend.requests:
        assert request.sampling.constraint == Constraint(ConstraintKind.GRAMMAR, grammar)
        assert dict(request.sampling.logit_bias) == biases


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [FACTS.vocab_size]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1], "guided_regex": "a"}, "guided_regex"),
        ({"allowed_token_ids": list(range(0, FACTS.vocab_size, 2))}, None),
    ],
)
async def test_allowed_tokens_that_cannot_be_are_named(api: Api, fields: dict[str, Any], param: str | None) -> None:
    answer = await api.http.post(COMPLETIONS, json={"prompt": "a", **fields})
    assert (answer.status_code == 200) is (param is None)
    assert param is None or answer.json()["error"]["param"] == param


async def test_special_tokens_are_left_out_of_the_text_unless_asked_for(api: Api) -> None:
    for skip in (None, True, False):
        await post(api, CHAT, messages=HI, skip_special_tokens=skip)
    assert [request.skip_special_tokens for request in api.frontend.requests] == [True, True, False]
    shown = [api.text.assembler(SamplingParams(), skip=skip).push([END]).text for skip in (True, False)]
    assert shown == ["", api.text.token_name(END)]
