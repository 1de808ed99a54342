"""Rerank and score where a model ranks by its answer, over a frontend that plays scripts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.limits import MAX_EMBEDDINGS_AT_ONCE
from common.contracts.types import FinishReason, TokenLogprobs
from router.api.openai.scores import Ranking, Scores, yes_probability
from router.contracts.events import ValidatedRequest
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.http_harness import FACTS, Api, served_api
from tests.support.turns import until_idle
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

YES, NO = 40, 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api(ranks=(YES, NO)) as running:
        yield running


async def post(api: Api, path: str, **body: Any) -> tuple[int, Any]:
    answer = await api.http.post(path, json=body)
    return answer.status_code, answer.json()


def judged(yes: float) -> TokenLogprobs:
    """Return the log-probabilities of an answer that is yes with this probability, of an output of other tokens too."""
    top = sorted(((YES, math.log(yes / 2)), (NO, math.log((1 - yes) / 2))), key=lambda each: -each[1])
    return TokenLogprobs(top[0][0], top[0][1], tuple(top))


def by_length(request: ValidatedRequest) -> list[Any]:
    """Say that longer prompts are the better ones."""
    entry = judged(1 - 1 / len(request.prompt))
    return [admitted(request), tokens("y", entry.token_id, logprobs=(entry,)), finished(1, reason=FinishReason.LENGTH)]


async def test_documents_are_ranked_by_the_probability_of_yes(api: Api) -> None:
    api.frontend.script = by_length
    documents = ["of some length", "short", "the longest document of all"]
    status, body = await post(api, "/v1/rerank", query="q", documents=documents)
    answer = Ranking.model_validate(body)
    lengths = [len(request.prompt) for request in api.frontend.requests]
    assert (status, [each.index for each in answer.results]) == (200, [2, 0, 1])
    wanted = [1 - 1 / lengths[place] for place in (2, 0, 1)]
    assert [each.relevance_score for each in answer.results] == pytest.approx(wanted)
    assert answer.usage.prompt_tokens == sum(lengths)


async def test_a_pair_is_a_chat_with_one_token_of_output_that_no_default_changes(api: Api) -> None:
    api.frontend.script = by_length
    await post(api, "/v1/score", text_1="the query", text_2=["a document"], priority=-4, cache_salt="s")
    (request,) = api.frontend.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.logprob_token_ids) == (1, 0, (YES, NO))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.0, 1.0, 0, 1.0)
    assert (request.priority, request.salt, request.embeds, request.whole) == (-4, "s", False, True)
    text = api.text.decode(request.prompt, False)
    assert text.index("query") < text.index("the query") < text.index("document") < text.index("a document")


async def test_an_instruction_is_the_systems(api: Api) -> None:
    api.frontend.script = by_length
    await post(api, "/v1/rerank", query="q", documents=["d"], instruction="Find a town.")
    (request,) = api.frontend.requests
    assert "Find a town." in api.text.decode(request.prompt, False)


async def test_pairs_have_scores(api: Api) -> None:
    api.frontend.script = by_length
    status, body = await post(api, "/v1/score", text_1=["a", "longer"], text_2=["b", "longer too"])
    lengths = [len(request.prompt) for request in api.frontend.requests]
    assert (status, lengths[0] < lengths[1]) == (200, True)
    found = [each.score for each in Scores.model_validate(body).data]
    assert found == pytest.approx([1 - 1 / each for each in lengths])


async def test_few_pairs_run_at_once(api: Api) -> None:
    gate = asyncio.Event()
    api.frontend.script = lambda request: [by_length(request)[0], gate, *by_length(request)[1:]]
    running = asyncio.create_task(post(api, "/v1/rerank", query="q", documents=["d"] * (MAX_EMBEDDINGS_AT_ONCE + 3)))
    await until(lambda: len(api.frontend.requests) >= MAX_EMBEDDINGS_AT_ONCE, every=0)
    await until_idle()
    assert len(api.frontend.requests) == MAX_EMBEDDINGS_AT_ONCE
    gate.set()
    assert len((await running)[1]["results"]) == MAX_EMBEDDINGS_AT_ONCE + 3


LONG = "word " * (2 * FACTS.max_model_len)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"query": "", "documents": ["b"]}, "query", "is empty"),
        ({"query": "a", "documents": ["b", ""]}, "documents[1]", "is empty"),
        ({"query": "a", "documents": ["b", LONG]}, "documents[1]", "context"),
        ({"query": "a", "documents": [LONG]}, "documents[0]", "context"),
        ({"query": "a", "documents": ["b"] * 2048}, "documents", "has 2049 inputs"),
        ({"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "not offered here"),
        ({"query": "a", "documents": ["b"], "use_activation": False}, "use_activation", "not offered here"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    status, body = await post(api, "/v1/rerank", **fields)
    error = body["error"]
    assert (status, error["param"], words in error["message"]) == (400, param, True), error
    assert api.frontend.requests == []


@pytest.mark.parametrize(
    ("events", "status", "words"),
    [
        ([Overloaded(QuotaViolation("router.queue", "full"), 1.0)], 429, "full"),
        ([finished(0, reason=FinishReason.ERROR, message="not finite")], 500, "not finite"),
        ([tokens("a"), finished(1)], 500, "without the probabilities of yes and no"),
    ],
)
async def test_the_first_pair_that_fails_ends_all(api: Api, events: list[Any], status: int, words: str) -> None:
    api.frontend.script = lambda request: events
    found, body = await post(api, "/v1/rerank", query="a", documents=["b", "c"])
    assert (found, words in body["error"]["message"]) == (status, True), body
    assert api.frontend.ended == len(api.frontend.requests)


@pytest.mark.parametrize(
    ("yes", "no", "wanted"), [(-1.0, -1.0, 0.5), (0.0, -800.0, 1.0), (-800.0, 0.0, 0.0), (-1.0, -2.0, 0.7310585786)]
)
async def test_the_probability_of_yes(yes: float, no: float, wanted: float) -> None:
    assert yes_probability(yes, no) == pytest.approx(wanted)
