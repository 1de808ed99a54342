"""One client that asks for everything at the highest priority does not keep another one waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.contracts.limits import MAX_HTTP_SEQUENCES
from quire.inference.v1 import inference_pb2 as pb
from tests.support.suite import PATIENCE, Suite, greedy, running_suite
from tests.support.tenants import TenantSuite, random_prompts, tenant_suite
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# 16 places, so that the attack has 24 times as many sequences; each takes 8 s of steps or more.
STACK = StackOptions(
    model=CHECKPOINT,
    worker_flags=("--kv-blocks", "4096", "--max-num-seqs", "16", "--simulate", "base=4ms"),
)
REQUESTS, SEQUENCES, TOKENS = 6, 64, 2000
(PROMPT,) = random_prompts(1, 32, seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    """An attacker who may set priorities up to 0, and an ordinary client."""
    async with tenant_suite(tmp_path_factory.mktemp("keys"), {"attacker": "", "ordinary": ""}, STACK) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def anonymous(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """A suite without keys."""
    async with running_suite(tmp_path_factory.mktemp("anonymous"), STACK) as running:
        yield running


def flood(suite: Suite, metadata: tuple[tuple[str, str], ...] = ()) -> list[asyncio.Task[None]]:
    """Start the requests of the attack."""

    async def attack() -> None:
        request = greedy(PROMPT, TOKENS)
        request.sampling.n, request.priority = SEQUENCES, 100
        await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request), metadata=metadata)

    return [asyncio.create_task(attack()) for _ in range(REQUESTS)]


async def until_full(suite: Suite) -> None:
    """Wait until all requests of the attack are there and hold every slot that one tenant may hold."""
    await until(
        suite.status,
        lambda status: status.queued_requests + status.running_requests >= REQUESTS,
        every=0.02,
        seconds=PATIENCE,
    )
    await until(suite.pools, lambda pools: pools[0].running >= 15, every=0.02, seconds=PATIENCE)


async def until_many_wait(suite: Suite) -> None:
    await until(suite.status, lambda status: status.queued_requests >= 900, every=0.02, seconds=PATIENCE)


async def end(attack: list[asyncio.Task[None]]) -> None:
    for task in attack:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_tenant_is_served_while_another_asks_for_everything(tenants: TenantSuite) -> None:
    attack = flood(tenants.suite, tenants.metadata("attacker"))
    await until_full(tenants.suite)
    async with asyncio.timeout(PATIENCE):
        for prompt in random_prompts(5, 48, seed=2):
            assert len((await tenants.ask("ordinary", greedy(prompt, 8))).tokens) == 8
    assert not any(task.done() for task in attack)
    await end(attack)
    await tenants.suite.until_all_free(1)


def client(suite: Suite, address: str) -> httpx.AsyncClient:
    """Return a client that calls from an address of this machine."""
    transport = httpx.AsyncHTTPTransport(local_address=address)
    return httpx.AsyncClient(base_url=suite.stack.http_url, transport=transport, timeout=PATIENCE)


async def test_without_keys_another_address_is_served_beside_a_thousand_prompts(anonymous: Suite) -> None:
    async with client(anonymous, "127.0.0.1") as attacker, client(anonymous, "127.0.0.2") as ordinary:
        prompts = random_prompts(MAX_HTTP_SEQUENCES, 16, seed=3)
        body = {"prompt": prompts, "max_tokens": TOKENS, "priority": 100, "ignore_eos": True}
        attack = [asyncio.create_task(attacker.post("/v1/completions", json=body)) for _ in range(8)]
        async with asyncio.timeout(PATIENCE):
            await until_many_wait(anonymous)
            for prompt in random_prompts(5, 48, seed=4):
                answer = await ordinary.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8})
                assert answer.status_code == 200
        assert not any(task.done() for task in attack)
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)


async def test_a_full_queue_of_one_address_has_room_for_another(anonymous: Suite) -> None:
    async with client(anonymous, "127.0.0.1") as attacker, client(anonymous, "127.0.0.2") as ordinary:
        prompts = random_prompts(MAX_HTTP_SEQUENCES, 16, seed=5)
        body = {"prompt": prompts, "max_tokens": TOKENS, "ignore_eos": True}
        attack = [asyncio.create_task(attacker.post("/v1/completions", json=body)) for _ in range(8)]
        async with asyncio.timeout(PATIENCE):
            await until_many_wait(anonymous)
            # The rest of the queue: later ones of the same address are refused.
            more = [asyncio.create_task(attacker.post("/v1/completions", json=body)) for _ in range(2)]
            done, _ = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
            assert {each.result().status_code for each in done} == {429}
            answer = await ordinary.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8})
            assert answer.status_code == 200
        for task in (*attack, *more):
            task.cancel()
        await asyncio.gather(*attack, *more, return_exceptions=True)
