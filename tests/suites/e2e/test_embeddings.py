"""Embeddings from a suite of real processes, in HTTP and gRPC, by the official client too; a worker dies meanwhile."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from rich.console import Console

from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from cli.views.status import Ledgers, StatusView
from quire.client import AsyncClient, Client, InvalidRequest, Model, Status
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from tests.suites.e2e.conftest import WORKERS
from tests.support.checkpoints import MAX_POSITIONS, VOCAB_SIZE, tokenizer
from tests.support.embeddings import Vectors, embedding_checkpoint, pooled_by_hand, unpacked
from tests.support.load import kill
from tests.support.official_models import hold
from tests.support.suite import PATIENCE, Suite, greedy, running_suite
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["a small town", "the river, the bridge and the mill " * 8]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedders(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two workers on a bare decoder with a stored head; a step has 48 tokens, so that longer prompts are divided."""
    flags = ("--kv-blocks", "256", "--dtype", "float32", "--max-num-batched-tokens", "48")
    options = StackOptions(model=checkpoint_folder(), workers=WORKERS, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("embedders"), options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(embedders: Suite) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{embedders.stack.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(embedders: Suite) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=embedders.stack.http_url, timeout=PATIENCE) as made:
        yield made


def checkpoint_folder() -> Path:
    return embedding_checkpoint("llama", "mean")


def ids_of(texts: Sequence[str]) -> list[list[int]]:
    encode = tokenizer()
    return [encode(text).input_ids for text in texts]


def by_hand(prompts: Sequence[Sequence[int]]) -> Vectors:
    return pooled_by_hand(checkpoint_folder(), prompts, "mean")


def drawn(*lengths: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def prompt(ids: Sequence[int]) -> pb.Prompt:
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))


def assert_near(found: Any, expected: Vectors) -> None:
    """Compare vectors. Their last bits depend on what else is in a step."""
    assert np.abs(np.array(found) - expected).max() < 1e-5


async def test_the_official_client_gets_the_vectors_of_every_kind_of_input(client: openai.AsyncOpenAI) -> None:
    ids = ids_of(TEXTS)
    assert [len(each) for each in ids] == [12, 280]
    for asked, expected in ((TEXTS, ids), (TEXTS[0], ids[:1]), (ids, ids), (ids[1], ids[1:])):
        answer = await client.embeddings.create(model="", input=asked)
        assert_near([each.embedding for each in answer.data], by_hand(expected))
        assert [each.index for each in answer.data] == list(range(len(expected)))
        tokens = sum(map(len, expected))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


async def test_floats_and_base64_are_the_same_numbers(http: httpx.AsyncClient) -> None:
    found = []
    for form in ("float", "base64"):
        answer = await http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": form})
        assert (answer.status_code, len(answer.headers["x-trace-id"])) == (200, 32)
        if form == "float":
            hold(openai.types.CreateEmbeddingResponse, answer.text)
        found.append([each["embedding"] for each in answer.json()["data"]])
    floats, coded = found
    assert_near(floats, unpacked([base64.b64decode(each) for each in coded]))


async def test_fewer_dimensions_are_the_first_ones_at_length_one(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model="", input=TEXTS, dimensions=8)
    first = by_hand(ids_of(TEXTS))[:, :8]
    assert_near([each.embedding for each in answer.data], first / np.linalg.norm(first, axis=1, keepdims=True))


async def test_documents_are_ranked_and_pairs_scored_by_the_vectors(http: httpx.AsyncClient) -> None:
    texts = ["the bridge", *TEXTS, "a mill"]
    vectors = by_hand(ids_of(texts))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit[1:] @ unit[0]
    ranked = (await http.post("/v1/rerank", json={"query": texts[0], "documents": texts[1:], "top_n": 2})).json()
    assert [each["index"] for each in ranked["results"]] == [*np.argsort(-cosines)[:2]]
    assert_near([each["relevance_score"] for each in ranked["results"]], np.sort(cosines)[::-1][:2])
    scored = (await http.post("/v1/score", json={"text_1": texts[0], "text_2": texts[1:]})).json()
    assert_near([each["score"] for each in scored["data"]], cosines)
    tokens = sum(map(len, ids_of(texts)))
    assert (ranked["usage"]["total_tokens"], scored["usage"]["prompt_tokens"]) == (tokens, tokens)


async def test_grpc_answers_the_same_with_what_each_input_cost(embedders: Suite) -> None:
    ids = ids_of(TEXTS)
    inputs = [pb.Prompt(text=TEXTS[0]), prompt(ids[1])]
    answer = await embedders.inference.Embed(pb.EmbedRequest(request_id="both", inputs=inputs), timeout=PATIENCE)
    assert_near([each.values for each in answer.embeddings], by_hand(ids))
    assert [each.usage.prompt_tokens for each in answer.embeddings] == [12, 280]
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.output_tokens) == (292, 0, 0)
    found = {each.worker_id for each in answer.embeddings}
    assert found <= {"worker-0", "worker-1"}
    request = decision_pb2.ListDecisionsRequest(request_id="both-1")
    decisions = (await embedders.decisions.ListDecisions(request, timeout=PATIENCE)).decisions
    assert {each.kind for each in decisions} >= {"admission", "routing"}


async def test_both_python_clients_embed(embedders: Suite) -> None:
    ids, expected = ids_of(TEXTS), by_hand(ids_of(TEXTS))
    first = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    async with AsyncClient(embedders.stack.address) as client:
        whole, short = await client.embed(ids), await client.embed(TEXTS, dimensions=8)
    with Client(embedders.stack.address) as blocking:
        again = await asyncio.to_thread(blocking.embed, ids)
    assert_near(whole.vectors, expected)
    assert_near(short.vectors, first)
    assert_near(again.vectors, expected)
    assert again.usage.prompt_tokens == 292
    with pytest.raises(InvalidRequest, match="expected a list of inputs"), Client(embedders.stack.address) as blocking:
        blocking.embed(TEXTS[0])


async def test_an_input_may_fill_the_context_and_no_more(http: httpx.AsyncClient) -> None:
    (whole,) = drawn(MAX_POSITIONS)
    answer = await http.post("/v1/embeddings", json={"input": whole})
    assert_near([answer.json()["data"][0]["embedding"]], by_hand([whole]))
    refused = await http.post("/v1/embeddings", json={"input": [[7], [*whole, 9]]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "input[1]", "context_length_exceeded")
    assert f"maximum context length is {MAX_POSITIONS} tokens. However, the prompt has 1025" in error["message"]
    text = "the mill, " * 103
    cut = await http.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1})
    assert_near([cut.json()["data"][0]["embedding"]], by_hand([ids_of([text])[0][-MAX_POSITIONS:]]))
    begun = {"input": text, "truncate_prompt_tokens": 9, "truncation_side": "right"}
    cut = await http.post("/v1/embeddings", json=begun)
    assert_near([cut.json()["data"][0]["embedding"]], by_hand([ids_of([text])[0][:9]]))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "expected 1 to 2048"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [3, VOCAB_SIZE]}, "input", "expected a token id"),
        ({"input": "a", "dimensions": 65}, "dimensions", "expected 1 to 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "expected 1 or more"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "not offered"),
        ({"input": "a", "model": "another"}, None, "not served here"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, body: Any, param: str | None, words: str) -> None:
    answer = await http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param is None else 400, param)
    assert words in error["message"]


async def test_a_pool_that_embeds_generates_nothing_and_says_so(embedders: Suite, http: httpx.AsyncClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await embedders.generate(greedy([7, 8], 4))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "embeds (pooling: mean, normalised) and generates nothing" in str(refused.value.details())
    answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, "--pooling none" in answer.json()["error"]["message"]) == (400, True)
    await embedders.until_all_free(WORKERS)


async def test_cards_and_status_say_that_the_pool_embeds(embedders: Suite, http: httpx.AsyncClient) -> None:
    model = await embedders.inference.GetModel(pb.GetModelRequest(), timeout=PATIENCE)
    assert (model.identity.pooling, model.embedding_dimensions) == ("mean, normalised", 64)
    card = (await http.get("/v1/models")).json()["data"][0]
    assert card["pooling"] == "mean, normalised"
    console = Console(file=io.StringIO(), width=200)
    status = await embedders.status()
    console.print(StatusView(Model.from_proto(model), Status.from_proto(status), Ledgers()))
    printed = console.file
    assert isinstance(printed, io.StringIO)
    assert "embeds (mean, normalised)" in printed.getvalue()


async def test_a_client_that_goes_away_leaves_nothing_behind(embedders: Suite, http: httpx.AsyncClient) -> None:
    kill(embedders, "kvmanager", signal.SIGSTOP)
    try:
        asked = asyncio.create_task(http.post("/v1/embeddings", json={"input": drawn(*[600] * 6)}))
        await until_waiting(embedders, 6)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    finally:
        kill(embedders, "kvmanager", signal.SIGCONT)
    await embedders.until_all_free(WORKERS)
    await until_waiting(embedders, 0)


async def test_a_killed_worker_changes_no_vector_and_each_comes_once(embedders: Suite, http: httpx.AsyncClient) -> None:
    asked = drawn(300, 301, 302, 303, 304, 305)
    kill(embedders, "kvmanager", signal.SIGSTOP)  # no prompt gets blocks, so none is over before the kill
    try:
        running = asyncio.create_task(http.post("/v1/embeddings", json={"input": asked}))
        await until_waiting(embedders, len(asked))
        # The router may have preferred either of them: on a busy machine one looks slower.
        victim = max((await embedders.status()).workers, key=lambda worker: worker.waiting_sequences)
        assert victim.waiting_sequences > 0
        kill(embedders, victim.worker_id)
    finally:
        kill(embedders, "kvmanager", signal.SIGCONT)
    answer = (await running).json()
    assert [each["index"] for each in answer["data"]] == list(range(len(asked)))
    assert_near([each["embedding"] for each in answer["data"]], by_hand(asked))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, asked))
    assert await migrations(embedders) == victim.waiting_sequences
    await embedders.until_all_free(WORKERS)


async def until_waiting(suite: Suite, count: int) -> None:
    """Wait until so many sequences wait for blocks at the workers."""
    await until(
        suite.status,
        lambda status: sum(each.waiting_sequences for each in status.workers) == count,
        every=0.05,
        seconds=PATIENCE,
    )


async def migrations(suite: Suite) -> float:
    """Return how many sequences the router moved to another worker."""
    (address,) = metrics_addresses(suite.stack.options)
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://{address}/metrics", timeout=PATIENCE)).text
    lines = [line for line in page.splitlines() if line.startswith("quire:migrations_total{")]
    return float(lines[0].rpartition(" ")[2])
