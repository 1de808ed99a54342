"""POST /invocations: the body says which path is meant, and the answer is that of the path."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.router.callers import Closed
from tests.support.router.http_harness import HI, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/invocations"
JSON = {"content-type": "application/json"}
KINDS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


def facts(answer: httpx.Response) -> Any:
    """Return status and body without what differs from request to request."""
    body = answer.json()
    return answer.status_code, {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", KINDS)
async def test_an_answer_is_that_of_the_path_that_the_body_means(api: Api, path: str) -> None:
    wanted = await api.http.post(path, json=KINDS[path])
    assert facts(await api.http.post(PATH, json=KINDS[path])) == facts(wanted)
    assert {seen.method for seen in api.refusals.seen} <= {path}


async def test_a_chat_is_streamed(api: Api) -> None:
    answer = await api.http.post(PATH, json={"messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_wrong_field_is_named_as_at_the_path(api: Api) -> None:
    refused = await api.http.post(PATH, json={"messages": HI, "temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    (seen,) = api.refusals.seen
    assert seen.method == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", JSON),
        (b"{}", JSON),
        (b"[]", JSON),
        (b"{", JSON),
        (b'"messages"', JSON),
        (b'{"messages": []}', {}),
        (b"[" * 100_000, {"content-type": "text/plain"}),
        (b"\xff", {"content-type": "application/octet-stream"}),
    ],
)
async def test_a_body_that_means_no_path_is_refused(api: Api, content: bytes, headers: dict[str, str]) -> None:
    refused = await api.http.post(PATH, content=content, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "body")
    assert "messages, prompt, input, query, text_1" in refused.json()["error"]["message"]
    assert not api.frontend.requests


async def test_there_is_nothing_to_get(api: Api) -> None:
    assert (await api.http.get(PATH)).status_code == 404
    assert (await api.http.get("/ping")).status_code == 200


async def test_it_asks_for_a_key() -> None:
    async with served_api(Closed()) as api:
        assert (await api.http.post(PATH, json=KINDS["/v1/completions"])).status_code == 401
