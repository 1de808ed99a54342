"""Bodies before they are parsed: read whole, within the bytes that all requests of the process may hold."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI, Request

from common.contracts.clock import ManualClock
from common.contracts.limits import MAX_HTTP_BODY_BYTES, SMALL_HTTP_BODY_BYTES
from router.api.openai.bodies import BodyBudget, BodyGate
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


def raw_deflate(body: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(body) + made.flush()


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", lambda body: gzip.compress(body[:2]) + gzip.compress(body[2:])),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
    ],
)
async def test_a_compressed_body_is_served(
    coding: str, encode: Callable[[bytes], bytes], http: httpx.AsyncClient
) -> None:
    answer = await http.post("/", content=encode(b'"abc"'), headers=JSON | {"content-encoding": coding})
    assert answer.json() == 3


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, deflate"])
async def test_another_coding_is_named_with_415(coding: str, http: httpx.AsyncClient) -> None:
    answer = await http.post("/", content=b"x", headers=JSON | {"content-encoding": coding})
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == f"the content-encoding is {coding!r}; expected gzip, deflate or none"


@pytest.mark.parametrize("body", [b'"abc"', gzip.compress(b'"abc"' * 99, mtime=0)[:-9], b"", zlib.compress(b'"abc"')])
async def test_what_is_not_in_the_coding_that_it_names_is_refused(body: bytes, http: httpx.AsyncClient) -> None:
    answer = await http.post("/", content=body, headers=JSON | {"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert "is not whole, or not in gzip" in answer.json()["error"]["message"]


async def test_a_small_body_that_becomes_too_large_is_refused(http: httpx.AsyncClient) -> None:
    bomb = gzip.compress(bytes(2 * MAX_HTTP_BODY_BYTES))
    answer = await http.post("/", content=bomb, headers=JSON | {"content-encoding": "gzip"})
    assert answer.status_code == 413


async def test_a_compressed_body_counts_with_what_it_becomes(
    http: httpx.AsyncClient, budget: BodyBudget, held: asyncio.Event
) -> None:
    packed = JSON | {"content-encoding": "gzip"}
    first = asyncio.create_task(http.post("/", content=gzip.compress(LARGE), headers=packed))
    await until(lambda: budget.held == len(LARGE), every=0.01, seconds=PATIENCE_S)
    assert (await http.post("/", content=gzip.compress(LARGE), headers=packed)).status_code == 429
    held.set()
    assert (await first).json() == len(LARGE) - 2
    assert budget.held == 0


async def test_a_request_has_come_when_its_body_is_whole() -> None:
    """What a client takes to send it is not work of the router."""
    app, clock = FastAPI(), ManualClock(3.0)

    @app.post("/")
    async def received(request: Request) -> float:
        clock.advance(4.0)
        return float(request.state.received)

    async def body() -> AsyncIterator[bytes]:
        yield b'"a'
        clock.advance(2.0)
        yield b'bc"'

    gate = BodyGate(app, clock=clock)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://router") as client:
        assert (await client.post("/", content=body(), headers=JSON)).json() == 5.0
