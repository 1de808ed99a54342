"""Floods of texts to be made tokens, of which the router answers each: other tenants do not wait for them.

No tenant has a key here, so each address is one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.kserve.v2 import kserve_pb2_grpc
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.kserve_messages import infer
from tests.support.router.router_process import (
    RouterUnderAttack,
    post,
    raw_connection,
    router_under_attack,
    whole_answer,
)
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
WORDS = "the quick brown foxes jump over many lazy dogs and some of them sleep "
SMALL = (WORDS * 30)[:2_000]
CONNECTIONS = 150
INFERENCE, KSERVE = inference_pb2_grpc.InferenceServiceStub, kserve_pb2_grpc.GRPCInferenceServiceStub


def tokenize(text: str) -> tuple[str, bytes]:
    return "/tokenize", json.dumps({"prompt": text}).encode()


def count_tokens(text: str) -> tuple[str, bytes]:
    body = {"model": "checkpoint", "messages": [{"role": "user", "content": text}]}
    return "/v1/messages/count_tokens", json.dumps(body).encode()


def completion(text: str) -> tuple[str, bytes]:
    """Return a request that is refused when its tokens are counted: the model's context is far shorter."""
    return "/v1/completions", json.dumps({"prompt": text, "max_tokens": 1}).encode()


def chat_of_many(text: str) -> tuple[str, bytes]:
    """Return a chat of so many messages that it is rendered off the event loop."""
    messages = [{"role": "user", "content": text[start : start + 500]} for start in range(0, len(text), 500)]
    return "/tokenize", json.dumps({"messages": messages}).encode()


def embeddings(text: str) -> tuple[str, bytes]:
    return "/v1/embeddings", json.dumps({"input": [text]}).encode()


@dataclass
class Flood:
    """The attacker's connections, and how many were answered so far."""

    answered: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


@asynccontextmanager
async def flood(router: RouterUnderAttack, path: str, body: bytes, count: int = CONNECTIONS) -> AsyncIterator[Flood]:
    """Send a body on many connections at once; at the end all of them go away."""
    found = Flood()

    async def answered(reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionResetError):
            if await reader.readline():
                found.answered += 1

    async with AsyncExitStack() as stack:
        for _ in range(count):
            reader, writer = await stack.enter_async_context(raw_connection(router.http_port, ATTACKER))
            writer.write(post(path, body))
            found.tasks.append(asyncio.create_task(answered(reader)))
        yield found
    await asyncio.gather(*found.tasks)


async def asked(router: RouterUnderAttack, path: str, body: bytes, local: str = OTHER) -> bytes:
    async with asyncio.timeout(PATIENCE_S), raw_connection(router.http_port, local) as (reader, writer):
        writer.write(post(path, body, "Connection: close"))
        return await whole_answer(reader)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[RouterUnderAttack]:
    async with router_under_attack(FakeWorker(automatic=True, num_blocks=4096)) as router:
        yield router


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(*tokenize((WORDS * 800)[:50_000]), id="tokenize"),
        pytest.param(*count_tokens((WORDS * 800)[:50_000]), id="count_tokens"),
        pytest.param(*completion((WORDS * 800)[:50_000]), id="refused completions"),
        pytest.param(*embeddings((WORDS * 800)[:50_000]), id="refused embeddings"),
        pytest.param(*chat_of_many((WORDS * 800)[:50_000]), id="chat"),
    ],
)
async def test_another_tenants_text_waits_for_no_queue_of_texts(
    attacked: RouterUnderAttack, path: str, body: bytes
) -> None:
    async with asyncio.timeout(PATIENCE_S), flood(attacked, path, body) as flooding:
        await until(lambda: flooding.answered > 0)
        before = flooding.answered
        for request in (tokenize(SMALL), count_tokens(SMALL), tokenize(SMALL)):
            assert b"200 OK" in await asked(attacked, *request)
        # In the order of arrival nearly all of them would have been answered first.
        assert flooding.answered - before < CONNECTIONS / 3
    assert not attacked.tracebacks


async def test_a_text_that_waits_goes_away_with_its_client(attacked: RouterUnderAttack) -> None:
    request, count = tokenize((WORDS * 800)[:50_000]), 100
    began = attacked.cpu_seconds
    for _ in range(5):
        assert b"200 OK" in await asked(attacked, *request, ATTACKER)
    each = (attacked.cpu_seconds - began) / 5
    began = attacked.cpu_seconds
    async with flood(attacked, *request, count) as flooding:
        await until(lambda: flooding.answered > 0)
    # Behind all that still waits of this tenant.
    assert b"200 OK" in await asked(attacked, *request, ATTACKER)
    assert attacked.cpu_seconds - began < 0.7 * count * each


@pytest.mark.parametrize(
    ("stub", "method", "request_of"),
    [
        pytest.param(
            INFERENCE, "Tokenize", lambda text: pb.TokenizeRequest(prompt=pb.Prompt(text=text)), id="Tokenize"
        ),
        pytest.param(INFERENCE, "Embed", lambda text: pb.EmbedRequest(inputs=[pb.Prompt(text=text)] * 4), id="Embed"),
        pytest.param(KSERVE, "ModelInfer", lambda text: infer("checkpoint", text_input=text), id="ModelInfer"),
    ],
)
async def test_another_tenants_text_waits_for_no_queue_of_calls(
    attacked: RouterUnderAttack, stub: Any, method: str, request_of: Any
) -> None:
    answered = 0

    async def ask(channel: aio.Channel) -> None:
        nonlocal answered
        with suppress(aio.AioRpcError):  # most are refused: the context is far shorter
            await getattr(stub(channel), method)(request_of((WORDS * 800)[:50_000]), timeout=PATIENCE_S)
        answered += 1

    async with asyncio.timeout(PATIENCE_S), open_channel(attacked.grpc) as channel:
        calls = [asyncio.create_task(ask(channel)) for _ in range(CONNECTIONS)]
        try:
            await until(lambda: answered > 0)
            before = answered
            assert b"200 OK" in await asked(attacked, *tokenize(SMALL))
            assert answered - before < CONNECTIONS / 3
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    assert not attacked.tracebacks
