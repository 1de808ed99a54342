"""Answers of tens of megabytes that are sent as a whole: they hold up no turn of the router's event loop.

Before, one request with 64 sequences and 20 log-probabilities a token took the loop for seconds at its end.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from cli.commands.debug import dump, services
from common.contracts.hashing import little_endian_int32
from common.contracts.types import FinishReason
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kserve.v2 import kserve_pb2_grpc
from quire.types.v1 import types_pb2
from tests.support.processor import slowness
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.kserve_messages import infer
from tests.support.router.router_process import RouterUnderAttack, router_under_attack
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEQUENCES, TOKENS, LIKELY = 64, 120, 20
# Tokens that a message of the worker has for each sequence.
AT_ONCE = 10
# What a turn may take, in milliseconds of processor time; before the mend it took 1,300 for 300 tokens.
MOST_TURN_MS, MOST_P99_MS = 250.0, 100.0
IDS = range(100, 400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("router")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(folder: Path) -> AsyncIterator[RouterUnderAttack]:
    worker = FakeWorker(num_blocks=65536, max_num_seqs=2 * SEQUENCES, max_model_len=4096)
    async with router_under_attack(worker, "--debug-loop-turns", "--state-dir", str(folder)) as router:
        yield router


async def turns(router: RouterUnderAttack, folder: Path) -> dict[str, float]:
    """Return the figures of the router's loop since they were last taken."""
    (service,) = [each for each in services(folder, None) if each.entry["pid"] == router.process.pid]
    found = await asyncio.to_thread(dump, service, PATIENCE_S)
    return dict(found["state"]["loop_turns"])


async def sampled_at_once(worker: FakeWorker) -> None:
    """Send all output of the next request, as fast as the router reads."""
    rng = random.Random(1)
    first = len(worker.submits)
    await worker.until(lambda: len(worker.submits) == first + SEQUENCES)
    handles = [submit.handle for submit in worker.submits[first:]]
    entries = [
        types_pb2.TokenLogprobs(
            token_id=rng.choice(IDS),
            logprob=-rng.random(),
            top_token_ids=rng.sample(IDS, LIKELY),
            top_logprobs=[-9 * rng.random() for _ in range(LIKELY)],
        )
        for _ in range(SEQUENCES * AT_ONCE)
    ]
    owners = little_endian_int32([handle for handle in handles for _ in range(AT_ONCE)])
    tokens: dict[int, Sequence[int]] = {handle: [101] * AT_ONCE for handle in handles}
    worker.step(admitted=dict.fromkeys(handles, 0))
    for last in range(AT_ONCE, TOKENS + 1, AT_ONCE):
        ended = dict.fromkeys(handles, FinishReason.LENGTH) if last == TOKENS else None
        worker.step(tokens, finished=ended, logprobs=entries, logprob_handles=owners)
        await until(worker._outbox.empty, every=0)


async def over_http(router: RouterUnderAttack, path: str, **fields: Any) -> None:
    body = {"n": SEQUENCES, "max_tokens": TOKENS, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(f"http://127.0.0.1:{router.http_port}{path}", json=body)
    assert answer.status_code == 200, answer.text[:500]
    assert len(answer.content) == int(answer.headers["content-length"]) > 3 << 20
    found = json.loads(answer.content)
    assert found["usage"]["completion_tokens"] == SEQUENCES * TOKENS
    for choice in found["choices"]:
        lists = choice["logprobs"].get("content") or choice["logprobs"]["tokens"]
        assert (len(lists), choice["finish_reason"]) == (TOKENS, "length")


async def chat(router: RouterUnderAttack) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    await over_http(router, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=LIKELY)


async def completion(router: RouterUnderAttack) -> None:
    await over_http(router, "/v1/completions", prompt=list(IDS[:8]), logprobs=LIKELY, return_token_ids=True)


def grpc_request(max_tokens: int = TOKENS) -> pb.GenerateUnaryRequest:
    sampling = types_pb2.SamplingParams(n=SEQUENCES, max_tokens=max_tokens, ignore_eos=True, logprobs=LIKELY)
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=IDS[:8]))
    return pb.GenerateUnaryRequest(request=pb.GenerateRequest(prompt=prompt, sampling=sampling))


async def unary(router: RouterUnderAttack) -> None:
    async with open_channel(router.grpc) as channel:
        answer = await rpc.InferenceServiceStub(channel).GenerateUnary(grpc_request(), timeout=PATIENCE_S)
    assert [(len(each.token_ids), len(each.logprobs)) for each in answer.outputs] == [(TOKENS, TOKENS)] * SEQUENCES


async def kserve(router: RouterUnderAttack) -> None:
    wanted = {"n": SEQUENCES, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": LIKELY}
    outputs = ("output_ids", "logprobs")
    request = infer("checkpoint", outputs=outputs, input_ids=list(IDS[:8]), sampling_parameters=wanted)
    async with open_channel(router.grpc) as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(request, timeout=PATIENCE_S)
    (ids,) = [each for each in answer.outputs if each.name == "output_ids"]
    assert list(ids.shape) == [SEQUENCES * TOKENS]
    assert answer.ByteSize() > 3 << 20


@pytest.mark.parametrize("ask", [chat, completion, unary, kserve], ids=lambda ask: ask.__name__)
async def test_a_large_answer_is_made_in_short_turns(
    attacked: RouterUnderAttack, folder: Path, ask: Callable[[RouterUnderAttack], Coroutine[Any, Any, None]]
) -> None:
    """The best of three answers counts: a walk of the collector, or a neighbour on the core, lengthens a turn."""
    longest, p99 = math.inf, math.inf
    for _ in range(3):
        await turns(attacked, folder)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(ask(attacked))
            group.create_task(sampled_at_once(attacked.worker))
        found = await turns(attacked, folder)
        print(ask.__name__, found)  # noqa: T201
        longest, p99 = min(longest, found["cpu_max_ms"]), min(p99, found["cpu_p99_ms"])
    assert longest <= MOST_TURN_MS * slowness()
    assert p99 <= MOST_P99_MS * slowness()
    assert not attacked.tracebacks


async def test_an_answer_too_large_for_a_message_is_refused_before_its_work(attacked: RouterUnderAttack) -> None:
    submitted = len(attacked.worker.submits)
    async with open_channel(attacked.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.InferenceServiceStub(channel).GenerateUnary(grpc_request(4000), timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "stream the answer" in (refused.value.details() or "")
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"prompt": "a", "n": SEQUENCES, "max_tokens": 4000, "ignore_eos": True, "logprobs": LIKELY}
        body |= {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": LIKELY}
        answer = await client.post(f"http://127.0.0.1:{attacked.http_port}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), answer.text
    assert len(attacked.worker.submits) == submitted
