"""A client that reads slowly while its request brings much output: n = 64 with 20 log-probabilities each.

Its sequences end, so that the worker can free their blocks, and others are served.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from common.contracts.hashing import little_endian_int32
from common.contracts.types import FinishReason
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.router_process import RouterUnderAttack, post, router_under_attack

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEQUENCES = 64
LIKELY = 20
STEPS = 400
# Together more than the sockets between client and router hold.
TOKENS_A_STEP = 4
PROMPT = [5, 6, 7]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[RouterUnderAttack]:
    worker = FakeWorker(max_num_seqs=256, num_blocks=65536, max_model_len=2048)
    async with router_under_attack(worker) as router:
        yield router


def entry() -> types_pb2.TokenLogprobs:
    likely = list(range(300, 300 + LIKELY))
    return types_pb2.TokenLogprobs(token_id=400, logprob=-0.5, top_token_ids=likely, top_logprobs=[-1.5] * LIKELY)


async def flood(worker: FakeWorker, handles: list[int]) -> None:
    """Send steps of output for all handles, until the router has cancelled them or the output is complete."""
    owners = [handle for handle in handles for _ in range(TOKENS_A_STEP)]
    entries = [entry()] * len(owners)
    for _ in range(STEPS):
        if set(handles) <= {cancel.handle for cancel in worker.cancels}:
            return
        worker.step(
            {handle: [400] * TOKENS_A_STEP for handle in handles},
            logprobs=entries,
            logprob_handles=little_endian_int32(owners),
        )
        await asyncio.sleep(0.005)


async def begun(worker: FakeWorker, before: int, sequences: int) -> list[int]:
    """Wait until the sequences are submitted, admit them, and return their handles."""
    await worker.until(lambda: len(worker.submits) == before + sequences)
    handles = [submit.handle for submit in worker.submits[before:]]
    worker.step(admitted=dict.fromkeys(handles, 0))
    return handles


def hostile() -> pb.GenerateRequest:
    sampling = types_pb2.SamplingParams(n=SEQUENCES, logprobs=LIKELY, max_tokens=STEPS * TOKENS_A_STEP)
    return pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)), sampling=sampling)


async def innocent(channel: aio.Channel, worker: FakeWorker) -> list[int]:
    """Return the tokens of a small stream."""
    sampling = types_pb2.SamplingParams(max_tokens=2)
    wanted = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)), sampling=sampling)
    before = len(worker.submits)
    call = rpc.InferenceServiceStub(channel).Generate(wanted, timeout=PATIENCE_S)
    (handle,) = await begun(worker, before, 1)
    worker.step({handle: [100, 101]}, finished={handle: FinishReason.LENGTH})
    return [token async for event in call for token in event.tokens.token_ids]


async def all_cancelled(worker: FakeWorker, handles: list[int]) -> None:
    wanted = set(handles)
    await worker.until(lambda: wanted <= {cancel.handle for cancel in worker.cancels})


async def test_a_slow_reader_over_grpc_loses_its_sequences_and_nobody_else_does(attacked: RouterUnderAttack) -> None:
    worker, before = attacked.worker, attacked.rss_mib
    async with open_channel(attacked.grpc) as slow, open_channel(attacked.grpc) as other:
        submitted = len(worker.submits)
        call = rpc.InferenceServiceStub(slow).Generate(hostile(), timeout=PATIENCE_S)
        handles = await begun(worker, submitted, SEQUENCES)
        await flood(worker, handles)
        grown = attacked.rss_mib - before
        assert grown < 64, f"{grown:.0f} MiB"
        await all_cancelled(worker, handles)
        assert await innocent(other, worker) == [100, 101]
        with pytest.raises(aio.AioRpcError, match="the client reads too slowly") as ended:
            await read_all(call)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not attacked.tracebacks


@pytest.mark.parametrize("prompts", [1, 2], ids=["one prompt", "two prompts"])
async def test_a_slow_reader_over_http_loses_its_sequences_and_nobody_else_does(
    attacked: RouterUnderAttack, prompts: int
) -> None:
    worker, before = attacked.worker, attacked.rss_mib
    fields: dict[str, Any] = {"prompt": [PROMPT] * prompts, "n": SEQUENCES // prompts, "logprobs": LIKELY}
    body = json.dumps(fields | {"stream": True, "max_tokens": STEPS * TOKENS_A_STEP}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(("127.0.0.1", attacked.http_port))
        client.setblocking(False)
        submitted = len(worker.submits)
        await asyncio.get_running_loop().sock_sendall(client, post("/v1/completions", body))
        handles = await begun(worker, submitted, SEQUENCES)
        await flood(worker, handles)
        grown = attacked.rss_mib - before
        assert grown < 64, f"{grown:.0f} MiB"
        await all_cancelled(worker, handles)
        async with open_channel(attacked.grpc) as other:
            assert await innocent(other, worker) == [100, 101]
        said = await rest_of(client)
    assert b"the client reads too slowly" in said[-2000:], said[-2000:]
    assert not attacked.tracebacks


async def read_all(call: aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
    async for _ in call:
        pass


async def rest_of(client: socket.socket) -> bytes:
    """Read a stream to its last line."""
    said = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"[DONE]" not in said[-100:]:
            said = said[-4000:] + await asyncio.get_running_loop().sock_recv(client, 1 << 20)
    return said
