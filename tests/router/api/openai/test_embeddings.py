"""/v1/embeddings over a frontend that plays scripts: the form of answers, and how inputs run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.limits import MAX_EMBEDDINGS_AT_ONCE
from common.contracts.types import FinishReason
from router.api.openai.schema import EmbeddingList
from tests.support.router.fake_frontend import admitted, embedded, finished
from tests.support.router.http_harness import Api
from tests.support.turns import until_idle
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(api: Api, **body: Any) -> tuple[int, Any]:
    answer = await api.http.post("/v1/embeddings", json=body)
    return answer.status_code, answer.json()


async def test_an_answer_has_the_documented_form(api: Api) -> None:
    status, body = await post(api, input=["a", "b"], encoding_format="float")
    answer = EmbeddingList.model_validate(body)
    assert (status, answer.model, answer.usage.total_tokens) == (200, "demo", 6)
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx([0.6, 0.8])
    _, coded = await post(api, input="a", encoding_format="base64")
    assert coded["data"][0]["embedding"] == "mpkZP83MTD8="


async def test_requests_embed_and_carry_their_place(api: Api) -> None:
    await post(api, input=[[3, 4], [5]], priority=-2, cache_salt="s", add_special_tokens=False)
    first, second = api.frontend.requests
    assert (first.embeds, first.prompt, first.priority, first.salt) == (True, (3, 4), -2, "s")
    assert first.request_id is not None
    assert (first.request_id[-2:], second.request_id) == ("-0", f"{first.request_id[:-2]}-1")


async def test_numbers_keep_every_bit_of_a_float32(api: Api) -> None:
    numbers = (0.1, -1.17549435e-38, 3.4028234e38, 1 / 3)
    api.frontend.script = lambda request: [admitted(request), embedded(*numbers)]
    _, body = await post(api, input="a", encoding_format="float")
    again = embedded(*body["data"][0]["embedding"])
    assert again.embedding == embedded(*numbers).embedding


async def test_few_inputs_of_a_call_run_at_once(api: Api) -> None:
    gate = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), gate, embedded(1.0)]
    running = asyncio.create_task(post(api, input=[[3]] * (MAX_EMBEDDINGS_AT_ONCE + 7)))
    await until(lambda: len(api.frontend.requests) >= MAX_EMBEDDINGS_AT_ONCE, every=0)
    await until_idle()
    assert len(api.frontend.requests) == MAX_EMBEDDINGS_AT_ONCE
    gate.set()
    _, body = await running
    assert len(body["data"]) == MAX_EMBEDDINGS_AT_ONCE + 7


async def test_the_first_input_that_fails_ends_all(api: Api) -> None:
    gate = asyncio.Event()

    def script(request: Any) -> list[Any]:
        if request.prompt == (4,):
            return [Overloaded(QuotaViolation("router.queue", "full"), 1.0)]
        return [admitted(request), gate]

    api.frontend.script = script
    status, body = await post(api, input=[[3], [4], [5]])
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert api.frontend.ended == len(api.frontend.requests)


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (finished(0, reason=FinishReason.ERROR, message="not finite"), 500, "not finite"),
        (finished(0), 500, "no vector"),
        (finished(0, reason=FinishReason.DEADLINE), 504, "ended early"),
    ],
)
async def test_an_end_without_a_vector_is_an_error(api: Api, end: Any, status: int, words: str) -> None:
    api.frontend.script = lambda request: [admitted(request), end]
    found, body = await post(api, input="a")
    assert (found, words in body["error"]["message"]) == (status, True)


async def test_more_inputs_than_are_served_are_refused_before_the_work(api: Api) -> None:
    status, body = await post(api, input=[[3]] * 2049)
    assert (status, body["error"]["param"], api.frontend.requests) == (400, "input", [])
    assert "has 2049 inputs; expected 1 to 2048" in body["error"]["message"]
