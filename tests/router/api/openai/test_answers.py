"""What is answered, held strictly to the models of the official client and to those that /openapi.json describes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai.types
import openai.types.chat
import pytest
from pydantic import BaseModel

from common.contracts.errors import Unavailable
from common.contracts.types import TokenLogprobs
from router.api.openai import schema as described
from router.api.openai.answer import Bill
from router.contracts.events import GenerateEvent, ValidatedRequest
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import HI, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def two_choices(request: ValidatedRequest) -> list[Step]:
    """Two sequences that take turns, with log-probabilities."""
    given = TokenLogprobs(40, -0.5, ((40, -0.5), (41, -1.5)))
    events: list[GenerateEvent] = [admitted(request, cached=1)]
    for text in ("Hel", "lo"):
        events += [tokens(text, 40, index=index, logprobs=(given,)) for index in (1, 0)]
    return [*events, finished(2, index=1, stop="END"), finished(2, index=0, cached=1)]


def lines_of(answer: httpx.Response) -> list[str]:
    """Return the data of the lines of a stream, after checking its form."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = answer.text.split("\n\n")
    assert last == ""
    data = [line.rpartition("\n")[2] for line in lines]  # after its id, where it has one
    assert all(line.startswith("data: ") for line in data)
    return [line.removeprefix("data: ") for line in data]


@pytest.mark.parametrize(
    ("path", "body", "models"),
    [
        (CHAT, {"messages": HI}, (openai.types.chat.ChatCompletion, described.ChatCompletion)),
        (
            CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
            (openai.types.chat.ChatCompletion, described.ChatCompletion),
        ),
        (COMPLETIONS, {"prompt": "a"}, (openai.types.Completion, described.Completion)),
        (COMPLETIONS, {"prompt": "a", "n": 2, "logprobs": 2}, (openai.types.Completion, described.Completion)),
    ],
)  # fmt: skip
async def test_an_answer_has_every_field_in_its_type(
    api: Api, path: str, body: dict[str, Any], models: tuple[type[BaseModel], ...]
) -> None:
    if "n" in body:
        api.frontend.script = two_choices
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200
    for model in models:
        model.model_validate_json(answer.content, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "models"),
    [
        (CHAT, {"messages": HI}, (openai.types.chat.ChatCompletionChunk, described.ChatChunk)),
        (
            CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
            (openai.types.chat.ChatCompletionChunk, described.ChatChunk),
        ),
        # The client's model of a completion has no chunk of its own: finish_reason must be there, and is null here too.
        (COMPLETIONS, {"prompt": "a", "n": 2, "logprobs": 2}, (described.CompletionChunk,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("usage", [{}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_a_chunk_has_every_field_in_its_type(
    api: Api, path: str, body: dict[str, Any], models: tuple[type[BaseModel], ...], usage: dict[str, bool]
) -> None:
    if "n" in body:
        api.frontend.script = two_choices
    *chunks, last = lines_of(await api.http.post(path, json=body | {"stream": True, "stream_options": usage}))
    assert last == "[DONE]"
    assert chunks
    for chunk in chunks:
        for model in models:
            model.model_validate_json(chunk, strict=True)


async def test_the_models_are_as_described(api: Api) -> None:
    listed = await api.http.get("/v1/models")
    described.Models.model_validate_json(listed.content, strict=True)
    for each in listed.json()["data"]:
        openai.types.Model.model_validate(each, strict=True)


async def test_an_answer_shows_when_and_from_what_it_is(api: Api) -> None:
    answer = await api.client.chat.completions.create(model="demo", messages=HI)
    models = await api.client.models.list()
    assert answer.created >= models.data[0].created
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.endswith("-0123456789ab")


async def test_usage_at_the_end_of_a_stream_counts_cached_tokens(api: Api) -> None:
    api.frontend.script = two_choices
    stream = await api.client.chat.completions.create(
        model="demo", messages=HI, n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(api.frontend.requests[0].prompt), 4)
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 1


async def test_usage_so_far_grows_with_each_chunk(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "stream": True, "stream_options": options}
    *chunks, _ = lines_of(await api.http.post(COMPLETIONS, json=body))
    assert [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_each_choice_with_its_prompt(api: Api, stream: bool) -> None:
    body = {"prompt": ["One ", "Two "], "echo": True, "stream": stream}
    answer = await api.http.post(COMPLETIONS, json=body)
    chunks = [json.loads(line) for line in lines_of(answer)[:-1]] if stream else [answer.json()]
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["One Hello world", "Two Hello world"]


async def test_echo_of_token_ids_is_their_text(api: Api) -> None:
    ids = await api.encode("Lyon is")
    answer = await api.client.completions.create(model="demo", prompt=ids, echo=True)
    assert answer.choices[0].text == "Lyon isHello world"


async def test_best_of_may_be_what_n_is(api: Api) -> None:
    api.frontend.script = two_choices
    answer = await api.client.completions.create(model="demo", prompt="a", n=2, best_of=2)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]


async def test_tokens_that_are_parts_of_a_character_have_their_exact_bytes(api: Api) -> None:
    parts = await api.encode("€")
    assert len(parts) > 1
    given = tuple(TokenLogprobs(part, -0.5, ((part, -0.5), (parts[-1], -1.5))) for part in parts)
    api.frontend.script = lambda request: [admitted(request), tokens("€", *parts, logprobs=given), finished(len(parts))]
    chat = await api.client.chat.completions.create(model="demo", messages=HI, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert bytes(byte for token in content for byte in token.bytes or ()) == "€".encode()
    assert all(token.token.startswith("bytes:\\x") for token in content)
    legacy = (await api.client.completions.create(model="demo", prompt="x", logprobs=2)).choices[0].logprobs
    assert legacy is not None
    assert legacy.tokens == [token.token for token in content]
    assert legacy.text_offset == [0] * len(parts)
    assert legacy.top_logprobs is not None
    assert [len(each) for each in legacy.top_logprobs] == [2] * (len(parts) - 1) + [1]


async def test_text_offsets_go_on_from_chunk_to_chunk(api: Api) -> None:
    hello, world = (await api.encode(" Lyon"))[0], (await api.encode(" is"))[0]
    api.frontend.script = lambda request: [
        admitted(request),
        tokens(" Lyon", hello, logprobs=(TokenLogprobs(hello, -0.5),)),
        tokens(" is", world, logprobs=(TokenLogprobs(world, -0.25),)),
        finished(2),
    ]
    stream = await api.client.completions.create(model="demo", prompt="x", logprobs=0, stream=True)
    found = [chunk.choices[0].logprobs async for chunk in stream]
    first = len(api.text.decode([hello], skip_special_tokens=False))
    assert [each and (each.text_offset, each.token_logprobs) for each in found] == [
        ([0], [-0.5]), ([first], [-0.25]), None
    ]  # fmt: skip


async def test_an_error_in_mid_stream_has_openais_form(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("a"), Unavailable("the worker is gone", 0.5)]
    *_, broken, last = lines_of(await api.http.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
    described.ErrorBody.model_validate_json(broken, strict=True)
    assert (json.loads(broken)["error"]["message"], last) == ("the worker is gone", "[DONE]")


async def test_text_of_any_kind_arrives_as_it_is(api: Api) -> None:
    odd = 'say "hi"\\ \n\t\x07\u2028 €😀'
    api.frontend.script = lambda request: [admitted(request), tokens(odd), finished(1)]
    stream = await api.client.chat.completions.create(model="demo", messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == odd
    whole = await api.client.completions.create(model="demo", prompt="a")
    assert whole.choices[0].text == odd


async def test_guessed_tokens_are_in_the_usage() -> None:
    details = Bill(5, 3, 40, drafted_tokens=9, accepted_draft_tokens=7).body()["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}
    assert openai.types.completion_usage.CompletionTokensDetails.model_validate(details, strict=True)
    assert described.CompletionTokensDetails.model_validate(details, strict=True)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
@pytest.mark.parametrize(
    ("path", "given"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "a"})]
)
async def test_a_stream_ends_with_its_usage_where_the_operator_wants_that(
    path: str, given: dict[str, Any], options: dict[str, Any]
) -> None:
    body = given | {"stream": True} | options
    asked = given | {"stream": True, "stream_options": {"include_usage": True}}
    async with served_api(forces_usage=True) as forced, served_api() as plain:
        found = (await forced.http.post(path, json=body)).text
        assert [line.count('"usage":') for line in found.split("\n\n")] == [
            line.count('"usage":') for line in (await plain.http.post(path, json=asked)).text.split("\n\n")
        ]
        assert '"total_tokens"' in found
        assert "usage" not in (await plain.http.post(path, json=body)).text
