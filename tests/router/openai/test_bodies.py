"""Bodies before they are parsed: read whole, within the bytes that all requests of the process may hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request

from common.limits import SMALL_HTTP_BODY_BYTES
from router.openai.bodies import BodyBudget, BodyGate
from tests.support.router.fake_worker import PATIENCE_S
from tests.support.waiting import until

LARGE = json.dumps("a" * (SMALL_HTTP_BODY_BYTES + 10)).encode()
JSON = {"content-type": "application/json"}


@pytest.fixture
def held() -> asyncio.Event:
    """Set to let large bodies be answered."""
    return asyncio.Event()


@pytest.fixture
def budget() -> BodyBudget:
    """Room for one large body."""
    return BodyBudget(len(LARGE) + 100)


@pytest.fixture
def http(budget: BodyBudget, held: asyncio.Event) -> httpx.AsyncClient:
    app = FastAPI()

    @app.post("/")
    async def echo(request: Request) -> int:
        size = len(await request.json())
        if size > 10:
            await held.wait()
        return size

    return httpx.AsyncClient(transport=httpx.ASGITransport(BodyGate(app, budget)), base_url="http://router")


async def test_bodies_together_are_bounded_and_small_ones_are_served_meanwhile(
    http: httpx.AsyncClient, budget: BodyBudget, held: asyncio.Event
) -> None:
    first = asyncio.create_task(http.post("/", content=LARGE, headers=JSON))
    await until(lambda: budget.held, every=0, seconds=PATIENCE_S)
    second = await http.post("/", content=LARGE, headers=JSON)
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert f"bodies of {len(LARGE)} bytes are being served" in second.json()["error"]["message"]
    assert (await http.post("/", content=b'"abc"', headers=JSON)).json() == 3
    held.set()
    assert (await first).json() == len(LARGE) - 2
    assert budget.held == 0
    assert (await http.post("/", content=LARGE, headers=JSON)).status_code == 200


async def test_a_body_in_parts_arrives_whole(http: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b'"a', b"", b'b"'):
            yield part

    assert (await http.post("/", content=parts(), headers=JSON)).json() == 2
