"""Speculation on a real suite: the tokens of plain decoding, over a killed worker; in usage and in errors.

Two workers serve the demo model, with `--speculative ngram` and with a draft model, which is the demo model too.
Whether a step drafts depends on times that a worker
measures. So a test that needs drafts asks until it gets some, and no other test depends on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.demo_model.prompts import messages, questions
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.load import prompts, with_a_worker_killed
from tests.support.reference import assert_greedy, greedy_tokens, tokenizer
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT, LONG, WORKERS = 48, 120, 2
ANSWERED = questions(4)[1]


# An engine tries both kinds in tests/gpuworker/engine.
SPECULATION = [
    pytest.param(("--speculative", "ngram"), id="ngram", marks=pytest.mark.exhaustive),
    pytest.param(("--draft-model", str(CHECKPOINT)), id="draft"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SPECULATION)
async def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    flags = ("--kv-blocks", "1024", "--dtype", "float32", *request.param, "--deterministic")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


def predicted(ids: list[int], count: int, wrong: int) -> pb.GenerateRequest:
    """Return a greedy request whose prediction is its output, all but the token at `wrong`."""
    output = greedy_tokens(ids, count)
    request = greedy(ids, count)
    request.prediction = tokenizer().decode([*output[:wrong], *output[wrong + 1 :]], skip_special_tokens=True)
    return request


async def test_streams_have_the_tokens_of_plain_decoding(suite: Suite) -> None:
    asked = prompts(12)
    requests = [predicted(ids, COUNT, 10) if place % 3 else greedy(ids, COUNT) for place, ids in enumerate(asked)]
    outcomes = await asyncio.gather(*map(suite.generate, requests))
    await suite.until_all_free(WORKERS)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)


async def test_sequences_of_a_request_are_sampled_by_seed_alone(suite: Suite) -> None:
    sampling = types.SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=COUNT, ignore_eos=True)
    request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompts(2)[1])), sampling=sampling)
    found = []
    for prediction in ("", ANSWERED.answer, system_words()):
        request.prediction = prediction
        answer = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE)
        found.append([list(output.token_ids) for output in answer.outputs])
    assert found[0] == found[1] == found[2]
    assert len(set(map(tuple, found[0]))) == 3


def system_words() -> str:
    return messages("")[0]["content"]


async def test_a_constrained_answer_matches(suite: Suite) -> None:
    request = greedy(prompts(1)[0], COUNT)
    request.regex, request.prediction = "(yes|no)", "yes"
    answer = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE)
    assert answer.outputs[0].text in ("yes", "no")


async def test_openais_client_sees_what_was_predicted(suite: Suite) -> None:
    asked: Any = {"model": "checkpoint", "messages": messages(ANSWERED.text), "temperature": 0, "max_tokens": LONG}
    asked["extra_body"] = {"ignore_eos": True}
    async with openai.AsyncOpenAI(base_url=f"{suite.stack.http_url}/v1", api_key="none", max_retries=0) as client:
        plain = (await client.chat.completions.create(**asked)).choices[0].message.content
        async with asyncio.timeout(PATIENCE):
            while True:
                answer = await client.chat.completions.create(
                    **asked, prediction={"type": "content", "content": [{"type": "text", "text": plain or ""}]}
                )
                assert answer.choices[0].message.content == plain
                assert answer.usage is not None
                details = answer.usage.completion_tokens_details
                if details is not None and details.accepted_prediction_tokens:
                    break
    assert details.rejected_prediction_tokens is not None
    assert details.accepted_prediction_tokens < answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": "a" * 70_000}, "prediction.content"),
        ({"type": "image", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
    ],
    ids=["too-long", "no-text", "empty"],
)
async def test_a_wrong_prediction_is_refused_by_name(suite: Suite, prediction: dict[str, str], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prediction": prediction}
    async with httpx.AsyncClient(base_url=suite.stack.http_url, timeout=PATIENCE) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert param in answer.text


async def test_streams_of_a_killed_worker_go_on_with_every_token_right(suite: Suite) -> None:
    asked, seeded = prompts(16, seed=1), [sampled(ids, seed) for seed, ids in enumerate(prompts(8, seed=2))]
    plain = [outcome.tokens for outcome in await asyncio.gather(*map(suite.generate, seeded))]
    for request, tokens in zip(seeded, plain, strict=True):
        request.prediction = tokenizer().decode([*tokens[:70], *tokens[71:]], skip_special_tokens=True)
    requests = [*(predicted(ids, LONG, 70) for ids in asked), *seeded]
    victim, outcomes = await with_a_worker_killed(suite, requests)
    assert victim.startswith("worker-")
    found = [outcome.tokens for outcome in outcomes]
    assert_greedy(asked, found[: len(asked)], LONG)
    assert found[len(asked) :] == plain, "a seed gives the same tokens, with drafts and on another worker"
    await suite.until_connected(WORKERS)
    await suite.until_all_free(WORKERS)


def sampled(ids: list[int], seed: int) -> pb.GenerateRequest:
    request = greedy(ids, LONG)
    request.sampling.temperature, request.sampling.seed = 0.8, seed
    return request
