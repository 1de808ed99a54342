"""Log-probabilities of prompts: echoed in OpenAI's lists, and in vLLM's form; what is refused before any work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.contracts.types import TokenLogprobs
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.tokenizer import Tokenizer
from router.api.openai import schema as described
from router.api.openai.prompt_logprobs import PromptEncoder, WantedLogprobs
from router.contracts.events import PromptLogprobs, ValidatedRequest
from tests.router.api.openai.test_answers import lines_of
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import HI, Api
from tests.support.router.tokenizers import byte_fallback

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def scored(request: ValidatedRequest, sampled: bool = True) -> list[Step]:
    """Events of a request in two pieces: each prompt token is the second of its place, and 40 the first."""
    events: list[Step] = [admitted(request)]
    count = request.sampling.prompt_logprobs or 0
    entries = [
        TokenLogprobs(token, -1.0 - place, ((40, -0.25), (token, -1.0 - place))[:count], rank=2)
        for place, token in enumerate(request.prompt[1:])
    ]
    events += [PromptLogprobs(tuple(part)) for part in (entries[:2], entries[2:]) if part]
    if not sampled:
        return [*events, finished(0)]
    last = TokenLogprobs(41, -0.5, ((41, -0.5),))
    for index in range(request.sampling.n):
        events += [tokens("!", 41, index=index, logprobs=(last,)), finished(1, index=index)]
    return events


async def test_an_echo_begins_with_the_lists_of_the_prompt(api: Api) -> None:
    ids = await api.encode("One and two")
    api.frontend.script = scored
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    (choice,) = answer["choices"]
    names = [api.text.token_name(token) for token in ids]
    found = choice["logprobs"]
    assert choice["text"] == "One and two!"
    assert found["token_logprobs"] == [None, *(-1.0 - place for place in range(len(ids) - 1)), -0.5]
    assert found["top_logprobs"][0] is None
    assert sorted(found["top_logprobs"][1].values()) == [-1.0, -0.25]
    assert found["text_offset"][-1] == len("One and two")
    assert len(found["tokens"]) == len(found["text_offset"]) == len(names) + 1
    assert "".join(found["tokens"][:-1]) == "One and two"
    assert api.frontend.requests[0].sampling.prompt_logprobs == 1
    described.Completion.model_validate(answer)


async def test_offsets_of_an_echo_count_the_text_that_it_shows() -> None:
    """A tokenizer in the manner of sentencepiece: special tokens and the first space of a text are not shown."""
    inner = byte_fallback()
    text = CheckpointText(Tokenizer(inner), None, 64)
    prompt = [inner.get_vocab()[token] for token in ("<s>", "▁a", "▁a", "b")]
    encoder = PromptEncoder(text, WantedLogprobs(echoed=0), as_ids=False)
    first = encoder.first(prompt[0])
    rest = encoder.columns([TokenLogprobs(token, -1.0) for token in prompt[1:]])
    assert text.decode(prompt) == "a ab"
    assert (first["text_offset"], rest["text_offset"]) == ("0", "0,1,3")


async def test_a_stream_has_the_same_text_and_lists(api: Api) -> None:
    api.frontend.script = scored
    body = {"prompt": "One and two", "echo": True, "logprobs": 2, "max_tokens": 1}
    (whole,) = (await api.http.post(COMPLETIONS, json=body)).json()["choices"]
    lines = lines_of(await api.http.post(COMPLETIONS, json=body | {"stream": True}))
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [value for part in parts for value in part] == values
    for line in lines[:-1]:
        described.CompletionChunk.model_validate_json(line)


async def test_each_choice_of_each_prompt_begins_with_its_own_prompt(api: Api) -> None:
    api.frontend.script = scored
    prompts = [await api.encode(text) for text in ("One and two", "Three")]
    body = {"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 1, "n": 2}
    choices = (await api.http.post(COMPLETIONS, json=body)).json()["choices"]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in choices]
    assert lengths == [len(prompt) + 1 for prompt in prompts for _ in range(2)]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"prompt_logprobs": 1}, {}])
async def test_an_echo_without_output_is_the_prompt(api: Api, fields: dict[str, Any]) -> None:
    api.frontend.script = lambda request: scored(request, sampled=False)
    body = {"prompt": "One and two", "echo": True, "max_tokens": 0} | fields
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], answer["usage"]["completion_tokens"]) == ("One and two", 0)
    assert (choice["logprobs"] is not None) == ("logprobs" in fields)
    assert (choice["prompt_logprobs"] is not None) == ("prompt_logprobs" in fields)
    assert api.frontend.requests[0].sampling.max_tokens == 0
    described.Completion.model_validate(answer)


async def test_a_prompt_of_one_token_has_no_log_probability(api: Api) -> None:
    api.frontend.script = lambda request: scored(request, sampled=False)
    body = {"prompt": [40], "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 0}
    (choice,) = (await api.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["logprobs"]["token_logprobs"], choice["prompt_logprobs"]) == ([None], [None])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_logprobs_have_the_form_of_vllm(api: Api, path: str) -> None:
    api.frontend.script = scored
    question: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "One and two"}
    answer = (await api.http.post(path, json=question | {"prompt_logprobs": 1})).json()
    (described.ChatCompletion if path == CHAT else described.Completion).model_validate(answer)
    first, *entries = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    prompt = api.frontend.requests[0].prompt
    assert (first, len(entries)) == (None, len(prompt) - 1)
    for place, (token, entry) in enumerate(zip(prompt[1:], entries, strict=True)):
        text = api.text.decode([token], skip_special_tokens=False)
        assert list(entry) == list(dict.fromkeys((str(token), "40")))
        assert entry[str(token)] == {"logprob": -1.0 - place, "rank": 2, "decoded_token": text}
        assert entry["40"]["rank"] == 1


async def test_both_forms_have_as_many_likely_tokens_as_they_ask_for(api: Api) -> None:
    api.frontend.script = scored
    body = {"prompt": "One and two", "echo": True, "logprobs": 0, "prompt_logprobs": 2, "max_tokens": 1}
    (choice,) = (await api.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:-1]] == [1] * (
        len(choice["prompt_logprobs"]) - 1
    )
    assert all(len(each) == 2 for each in choice["prompt_logprobs"][1:])
    assert api.frontend.requests[0].sampling.prompt_logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "is 21; expected 0 to 20"),
        ({"prompt_logprobs": -1, "echo": True, "logprobs": 2}, "prompt_logprobs", "is -1; expected 0 to 20"),
        ({"logprobs": 21, "echo": True}, "logprobs", "is 21; expected 0 to 20"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "belongs to a whole answer, and stream is set"),
        ({"echo": True, "logprobs": 0, "n": 2, "stream": True}, "n", "is more than 1, and only the first choice"),
        ({"max_tokens": 0}, "max_tokens", "is 0; expected 1 or more"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "is 0; expected 1 or more"),
    ],
)
async def test_what_has_no_answer_is_refused(api: Api, fields: dict[str, Any], param: str, what: str) -> None:
    answer = await api.http.post(COMPLETIONS, json={"prompt": "a"} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(f"{param}: {what}")
