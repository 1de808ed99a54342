"""Pages of other origins may call the HTTP API where the operator names them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.router.http_harness import Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN, OTHER = "https://chat.example", "https://other.example"
ASK = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_api() -> AsyncIterator[Api]:
    async with served_api(cors_origins=(ORIGIN,)) as running:
        yield running


async def test_a_named_page_may_ask_call_and_read_the_ids(open_api: Api) -> None:
    asked = await open_api.http.options("/v1/completions", headers={"origin": ORIGIN, **ASK})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
    for body, status in (({"prompt": "a"}, 200), ({}, 400)):
        answer = await open_api.http.post("/v1/completions", json=body, headers={"origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-quire-request-id", "x-llm-d-request-dropped-reason"} <= set(exposed)


async def test_a_named_page_may_delete(open_api: Api) -> None:
    ask = {**ASK, "access-control-request-method": "DELETE"}
    asked = await open_api.http.options("/v1/responses/resp_1", headers={"origin": ORIGIN, **ask})
    assert (asked.status_code, "DELETE" in asked.headers["access-control-allow-methods"]) == (200, True)


async def test_another_page_may_not(open_api: Api) -> None:
    asked = await open_api.http.options("/v1/completions", headers={"origin": OTHER, **ASK})
    assert (asked.status_code, "access-control-allow-origin" in asked.headers) == (400, False)
    answer = await open_api.http.post("/v1/completions", json={"prompt": "a"}, headers={"origin": OTHER})
    assert "access-control-allow-origin" not in answer.headers


async def test_by_default_no_page_may(api: Api) -> None:
    asked = await api.http.options("/v1/completions", headers={"origin": ORIGIN, **ASK})
    assert (asked.status_code, "access-control-allow-origin" in asked.headers) == (405, False)
