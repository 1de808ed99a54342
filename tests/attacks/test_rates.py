"""Work that a tenant has done for nothing: counting tokens, and requests that are refused after their tokens are made.

Each case has a tenant of its own with a low rate. Without a charge the router would answer for ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from grpc import aio

from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.kserve.v2 import kserve_pb2_grpc
from quire.vllm.v1 import engine_pb2, engine_pb2_grpc
from quire.vllm.v1 import inference_pb2 as vllm_pb2
from quire.vllm.v1 import inference_pb2_grpc as vllm_pb2_grpc
from router.tenants.keys import new_key
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.kserve_messages import infer
from tests.support.router.router_process import RouterUnderAttack, router_under_attack
from tests.support.tenants import write_tenants

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = "the quick brown foxes jump over many lazy dogs and some of them sleep "
LONG = WORDS * 300
CHAT = [{"role": "user", "content": LONG}]
# More than a minute's allowance of the rates below is never asked for between two refills of one request.
RATES = {"requests_per_minute": 4, "tokens_per_minute": 8_000}

Asked = Callable[["Attacked", str], Awaitable[str]]


@dataclass
class Attacked:
    """The router, a client of each port, and the key of each tenant."""

    router: RouterUnderAttack
    http: httpx.AsyncClient
    channel: aio.Channel
    keys: Mapping[str, str]

    def metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys[tenant]}"),)


def posted(path: str, **body: Any) -> Asked:
    """Return what asks over HTTP; it says "refused by RATE" where a rate has no room."""

    async def ask(attacked: Attacked, tenant: str) -> str:
        answer = await attacked.http.post(path, json=body, headers=dict(attacked.metadata(tenant)))
        if answer.status_code != 429:
            return str(answer.status_code)
        assert "retry-after" in answer.headers
        return f"refused by {answer.text}"

    return ask


def called(stub: Callable[[aio.Channel], Any], method: str, request: Any, streams: bool = False) -> Asked:
    """Return what asks over gRPC."""

    async def ask(attacked: Attacked, tenant: str) -> str:
        call = getattr(stub(attacked.channel), method)(request, timeout=PATIENCE_S, metadata=attacked.metadata(tenant))
        try:
            if streams:
                async for _ in call:
                    pass
            else:
                await call
        except aio.AioRpcError as error:
            name = error.code().name
            return f"refused by {error.details()}" if name == "RESOURCE_EXHAUSTED" else name
        return "OK"

    return ask


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=LONG), **fields)


HUGE = engine_pb2.TokenizedInput(input_ids=[4_000_000_000])
VLLM, ENGINE = vllm_pb2_grpc.InferenceStub, engine_pb2_grpc.VllmEngineStub
INFERENCE, KSERVE = inference_pb2_grpc.InferenceServiceStub, kserve_pb2_grpc.GRPCInferenceServiceStub
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
KINDS: dict[str, tuple[str, Asked]] = {
    "tokenize": ("200", posted("/tokenize", prompt=LONG)),
    "tokenize a chat": ("200", posted("/tokenize", messages=CHAT)),
    "detokenize": ("200", posted("/detokenize", tokens=[100] * 200)),
    "count_tokens": ("200", posted("/v1/messages/count_tokens", model="checkpoint", messages=CHAT)),
    "input_tokens": ("200", posted("/v1/responses/input_tokens", input=WORDS * 3)),
    "Tokenize": ("OK", called(INFERENCE, "Tokenize", pb.TokenizeRequest(prompt=pb.Prompt(text=LONG)))),
    "Detokenize": ("OK", called(INFERENCE, "Detokenize", pb.DetokenizeRequest(token_ids=[100] * 200))),
    "completions": ("400", posted("/v1/completions", prompt=LONG, max_tokens=1)),
    "list of completions": ("400", posted("/v1/completions", prompt=[LONG, "a"], max_tokens=1)),
    "chat": ("400", posted("/v1/chat/completions", messages=CHAT, max_tokens=1)),
    "chat with tools": ("400", posted("/v1/chat/completions", messages=CHAT, max_tokens=1, tools=[TOOL])),
    "a wrong field": ("400", posted("/v1/completions", prompt=LONG, max_tokens=1, temperature=99)),
    "messages": ("400", posted("/v1/messages", model="checkpoint", messages=CHAT, max_tokens=1)),
    "responses": ("400", posted("/v1/responses", input=LONG, max_output_tokens=1)),
    "embeddings": ("400", posted("/v1/embeddings", input=[LONG])),
    "Generate": ("INVALID_ARGUMENT", called(INFERENCE, "Generate", generate(), streams=True)),
    "GenerateUnary": (
        "INVALID_ARGUMENT",
        called(INFERENCE, "GenerateUnary", pb.GenerateUnaryRequest(request=generate(priority=1000))),
    ),
    "Embed": ("INVALID_ARGUMENT", called(INFERENCE, "Embed", pb.EmbedRequest(inputs=[pb.Prompt(text=LONG)]))),
    "Generate of vLLM": ("INVALID_ARGUMENT", called(VLLM, "Generate", vllm_pb2.GenerateRequest(text=LONG))),
    "Generate of an engine of vLLM": (
        "INVALID_ARGUMENT",
        called(ENGINE, "Generate", engine_pb2.GenerateRequest(text=LONG), streams=True),
    ),
    "ModelInfer": ("INVALID_ARGUMENT", called(KSERVE, "ModelInfer", infer("checkpoint", text_input=LONG))),
}
LIMITS = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attacked]:
    folder: Path = tmp_path_factory.mktemp("rates")
    options = {
        f"{number}-{rate}": f"{limit} = {RATES[limit]}"
        for number, (rate, limit) in product(range(len(KINDS)), LIMITS.items())
    } | {"list": "requests_per_minute = 20", "once": "requests_per_minute = 6", "free": ""}
    options |= {f"wrong-{number}": "requests_per_minute = 4" for number in range(len(WRONG))}
    keys = {name: new_key() for name in options}
    write_tenants(folder / "tenants.toml", keys, options)
    (folder / "server.key").write_text("5" * 64)
    flags = ("--tenants", str(folder / "tenants.toml"), "--server-key-file", str(folder / "server.key"))
    worker = FakeWorker(automatic=True, num_blocks=4096)
    async with (
        router_under_attack(worker, *flags) as router,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=PATIENCE_S) as http,
        open_channel(router.grpc) as channel,
    ):
        yield Attacked(router, http, channel, keys)


@pytest.mark.parametrize("rate", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
async def test_work_for_texts_ends_with_its_tenants_rate(attacked: Attacked, kind: str, rate: str) -> None:
    expected, ask = KINDS[kind]
    tenant = f"{list(KINDS).index(kind)}-{rate}"
    async with asyncio.timeout(PATIENCE_S):
        # A request is charged once, also one of which several parts of the router see that it is wrong.
        for _ in range(3 if rate == "requests" else 1):
            assert await ask(attacked, tenant) == expected
        said = expected
        while said == expected:
            said = await ask(attacked, tenant)
    assert f"tenant {tenant}.{LIMITS[rate]}" in said, said
    assert await ask(attacked, "free") == expected
    assert not attacked.router.tracebacks


WRONG = {
    "no prompt": posted("/v1/completions", prompt=5),
    "another model": posted("/v1/chat/completions", model="other", messages=CHAT),
    "no tool": posted("/v1/chat/completions", messages=CHAT, tools=[{"type": "function"}]),
    "too many inputs": posted("/v1/embeddings", input=["a"] * 3_000),
    "wrong messages": posted("/v1/messages", model="checkpoint", messages=5, max_tokens=1),
    "two prompts": posted("/tokenize", prompt="a", messages=CHAT),
    "a large body": posted("/v1/completions", prompt=["a"] * 140_000),
    "unknown ids": posted("/detokenize", tokens=[1 << 30]),
    "another model of vLLM": called(VLLM, "Generate", vllm_pb2.GenerateRequest(model="other", text="a")),
    "unknown ids of an engine of vLLM": called(ENGINE, "Embed", engine_pb2.EmbedRequest(tokenized=HUGE)),
}
# Answers to these.
SAID = {"400", "404", "422", "NOT_FOUND", "INVALID_ARGUMENT"}


@pytest.mark.parametrize("kind", WRONG)
async def test_a_request_that_cannot_be_read_is_a_request(attacked: Attacked, kind: str) -> None:
    tenant = f"wrong-{list(WRONG).index(kind)}"
    said = [await WRONG[kind](attacked, tenant) for _ in range(4)]
    assert set(said) <= SAID, said
    async with asyncio.timeout(PATIENCE_S):
        while said[-1] in SAID:
            said.append(await WRONG[kind](attacked, tenant))
    assert f"tenant {tenant}.requests_per_minute" in said[-1], said[-1]
    assert not attacked.router.tracebacks


async def test_a_list_is_refused_before_any_of_it_is_read_or_run(attacked: Attacked) -> None:
    assert await posted("/tokenize", prompt="a")(attacked, "list") == "200"
    submitted = len(attacked.router.worker.submits)
    many = posted("/v1/completions", prompt=["a"] * 60 + [LONG], max_tokens=1)
    assert "61 requests wanted; at most 20 requests a minute" in await many(attacked, "list")
    assert len(attacked.router.worker.submits) == submitted
    few = posted("/v1/completions", prompt=["a", "b", "c"], max_tokens=1)
    assert await few(attacked, "list") == "200"


async def test_a_request_that_a_rate_refuses_unread_is_recorded(attacked: Attacked) -> None:
    ask, tenant = KINDS["completions"][1], "0-tokens"
    async with asyncio.timeout(PATIENCE_S):
        while not (await ask(attacked, tenant)).startswith("refused"):
            pass
    headers = dict(attacked.metadata(tenant))
    answer = await attacked.http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1}, headers=headers)
    assert answer.status_code == 429, answer.text
    asked = decision_pb2.ListDecisionsRequest(request_id=answer.headers["x-quire-request-id"])
    found = await decision_pb2_grpc.DecisionServiceStub(attacked.channel).ListDecisions(
        asked, metadata=attacked.metadata(tenant)
    )
    (record,) = found.decisions
    assert record.chosen == f"tenant {tenant}.tokens_per_minute"
    assert json.dumps(LONG) not in str(record)


async def test_a_request_is_charged_once_however_often_its_prompt_is_looked_at(attacked: Attacked) -> None:
    """The router lowers the tokens of a message to what the context holds, and cuts a response's conversation."""
    message = posted("/v1/messages", model="checkpoint", messages=[{"role": "user", "content": "a"}], max_tokens=99_999)
    items = [{"role": "user", "content": WORDS}] * 40
    response = posted("/v1/responses", input=items, max_output_tokens=1, truncation="auto")
    asked = [await ask(attacked, "once") for ask in (message, response) * 3]
    assert asked == ["200"] * 6
