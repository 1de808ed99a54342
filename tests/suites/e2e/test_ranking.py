"""A decoder that ranks by its answer, on a real suite: its scores are those of transformers, cached or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cli.suite.stack import StackOptions
from tests.support.ranking import ranking_checkpoint, scored_by_hand
from tests.support.suite import PATIENCE, Suite, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "Where is the old mill?"
DOCUMENTS = ["By the river.", "It rained in March, and the bridge was closed for a week.", "yes", "n"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    flags = ("--kv-blocks", "512", "--dtype", "float32")
    options = StackOptions(model=ranking_checkpoint("qwen3"), worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("ranker"), options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(ranker: Suite) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=ranker.stack.http_url, timeout=PATIENCE) as made:
        yield made


def by_hand(query: str, document: str, instruction: str = "") -> float:
    return scored_by_hand(ranking_checkpoint("qwen3"), query, document, instruction)


async def test_documents_are_ranked_as_transformers_scores_them(ranker: Suite, http: httpx.AsyncClient) -> None:
    wanted = {place: by_hand(QUERY, document) for place, document in enumerate(DOCUMENTS)}
    assert max(wanted.values()) - min(wanted.values()) > 0.01, "else any order would do"
    for _ in range(2):  # the second time the prompts are cached
        body = (await http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})).json()
        found = {each["index"]: each["relevance_score"] for each in body["results"]}
        assert found == pytest.approx(wanted, abs=1e-4)
        assert [*found] == sorted(wanted, key=lambda place: -wanted[place])
    await ranker.until_all_free(1)


@pytest.mark.parametrize("instruction", ["", "Say whether it names a place."])
async def test_pairs_have_the_scores_of_transformers(http: httpx.AsyncClient, instruction: str) -> None:
    fields: dict[str, Any] = {"instruction": instruction} if instruction else {}
    answer = await http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS} | fields)
    found = [each["score"] for each in answer.json()["data"]]
    assert found == pytest.approx([by_hand(QUERY, document, instruction) for document in DOCUMENTS], abs=1e-4)


async def test_it_generates_and_embeds_nothing(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models")).json()["data"][0]["pooling"] is None
    assert (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).status_code == 200
    assert (await http.post("/v1/embeddings", json={"input": "a"})).status_code == 400
