"""/v1/rerank and /v1/score over a frontend that plays scripts: forms, orders, and how mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import Unsupported
from router.api.openai.scores import Ranking, Scores
from router.contracts.events import ValidatedRequest
from tests.support.router.fake_frontend import admitted, embedded
from tests.support.router.http_harness import FACTS, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The cosines of these with the vector of "query" are 1, 0.6, 0 and -1.
VECTORS = {"query": (2.0, 0.0), "same": (1.0, 0.0), "near": (3.0, 4.0), "apart": (0.0, 1.0), "against": (-5.0, 0.0)}


async def post(api: Api, path: str, **body: Any) -> tuple[int, Any]:
    answer = await api.http.post(path, json=body)
    return answer.status_code, answer.json()


async def by_text(api: Api) -> None:
    """Let each text have its vector."""
    vectors = {tuple(await api.encode(text)): vector for text, vector in VECTORS.items()}
    api.frontend.script = lambda request: [admitted(request), embedded(*vectors[request.prompt])]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_in_the_order_of_their_scores(api: Api, path: str) -> None:
    await by_text(api)
    documents = ["apart", {"text": "same"}, "against", "near"]
    status, body = await post(api, path, model="demo", query="query", documents=documents)
    answer = Ranking.model_validate(body)
    assert (status, answer.model, answer.usage.prompt_tokens) == (200, "demo", 15)
    found = [(each.index, each.document and each.document.text) for each in answer.results]
    assert found == [(1, "same"), (3, "near"), (0, "apart"), (2, "against")]
    assert [each.relevance_score for each in answer.results] == pytest.approx([1.0, 0.6, 0.0, -1.0])
    assert answer.id.startswith("rerank-")


async def test_the_best_come_alone_and_without_their_texts(api: Api) -> None:
    await by_text(api)
    fields: dict[str, Any] = {"query": "query", "documents": ["apart", "same", "near"]}
    _, body = await post(api, "/v1/rerank", **fields, top_n=2, return_documents=False)
    assert body["results"] == [
        {"index": 1, "relevance_score": 1.0},
        {"index": 2, "relevance_score": pytest.approx(0.6)},
    ]
    for top_n in (0, 3, 9):
        assert len((await post(api, "/v1/rerank", **fields, top_n=top_n))[1]["results"]) == 3


async def test_equal_scores_keep_the_order_of_the_request(api: Api) -> None:
    await by_text(api)
    _, body = await post(api, "/v1/rerank", query="query", documents=["near", "same", "near"])
    assert [each["index"] for each in body["results"]] == [1, 0, 2]


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (("text_1", "text_2"), "/v1/score"),
        (("text_1", "text_2"), "/score"),
        (("queries", "documents"), "/v1/score"),
        (("queries", "items"), "/v1/score"),
        (("data_1", "data_2"), "/v1/score"),
    ],
)
@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ("query", "near", [0.6]),
        ("query", ["near", "against"], [0.6, -1.0]),
        (["query"], ["near", "apart"], [0.6, 0.0]),
        (["query", "apart"], ["same", "near"], [1.0, 0.8]),
    ],
)
async def test_pairs_have_scores(
    api: Api, names: tuple[str, str], path: str, first: Any, second: Any, wanted: list[float]
) -> None:
    await by_text(api)
    status, body = await post(api, path, **{names[0]: first, names[1]: second})
    answer = Scores.model_validate(body)
    assert (status, [each.index for each in answer.data]) == (200, [*range(len(wanted))])
    assert [each.score for each in answer.data] == pytest.approx(wanted)
    assert (answer.model, answer.id[:6], answer.data[0].object) == ("demo", "score-", "score")


async def test_a_vector_of_zeros_is_like_nothing(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), embedded(0.0, 0.0)]
    _, body = await post(api, "/v1/score", text_1="a", text_2="b")
    assert body["data"][0]["score"] == 0.0


async def test_texts_are_requests_for_embeddings(api: Api) -> None:
    await post(api, "/v1/rerank", query="a", documents=["b", "c"], priority=-3, cache_salt="s", request_id="mine")
    requests = api.frontend.requests
    assert {(each.embeds, each.priority, each.salt, each.correlation_id) for each in requests} == {
        (True, -3, "s", "mine")
    }
    assert [(each.request_id or "")[-2:] for each in requests] == ["-0", "-1", "-2"]


LONG = "word " * (2 * FACTS.max_model_len)


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "has no document"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2048}, "documents", "has 2049 inputs; expected 1 to 2048"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query", "empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]", "context"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "is -1; expected 0 for all"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]", ""),
        ("/v1/rerank", {"query": "a"}, "documents", ""),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, "rank_fields", "not offered"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1", "has no text"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "has no text"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "has 2 texts, and text_2 1; expected one"),
        ("/v1/score", {"text_1": "", "text_2": ["c"]}, "text_1", "empty"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", ""]}, "text_2[1]", "empty"),
        ("/v1/score", {"text_1": "a"}, "text_2", ""),
    ],
)
async def test_what_is_wrong_is_named(api: Api, path: str, fields: dict[str, Any], param: str, words: str) -> None:
    status, body = await post(api, path, **fields)
    error = body["error"]
    assert (status, str(error["param"])[: len(param)], words in error["message"]) == (400, param, True), error


async def test_a_pool_that_generates_says_what_to_start(api: Api) -> None:
    def script(request: ValidatedRequest) -> list[Any]:
        return [Unsupported("this pool generates; start another one")]

    api.frontend.script = script
    status, body = await post(api, "/v1/rerank", query="a", documents=["b"])
    assert (status, body["error"]["message"]) == (400, "this pool generates; start another one")


async def test_another_model_is_not_found(api: Api) -> None:
    status, body = await post(api, "/v1/rerank", model="other", query="a", documents=["b"])
    assert (status, body["error"]["code"]) == (404, "model_not_found")
