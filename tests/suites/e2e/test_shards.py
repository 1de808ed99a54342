"""One pool that four KV managers share, each with a worker of its own: real processes, one Redis, real tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cli.demo_model import CHECKPOINT
from cli.demo_model.prompts import questions, system_text
from cli.suite.stack import StackOptions
from common.contracts import index_format
from quire.decision.v1 import decision_pb2
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.support.index_view import Index, identity_of
from tests.support.load import all_started, kill, prompts
from tests.support.reference import assert_greedy, chat_tokens
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

SHARDS, COUNT = 4, 96
WORKERS = {f"worker-{number}" for number in range(SHARDS)}

# No two prompts of this file are equal: only one worker has each cached.
_NUMBERS = itertools.count(1000)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def split(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Four managers and four workers, 1024 blocks each, float32; each test leaves all of them running and idle."""
    flags = ("--kv-blocks", "1024", "--dtype", "float32", "--orphan-grace", "1")
    options = StackOptions(
        model=CHECKPOINT,
        workers=SHARDS,
        shards=SHARDS,
        standby_ports=(0,) * (SHARDS - 1),
        worker_flags=flags,
        manager_flags=("--group-lease", "5"),  # no manager that runs loses it, on a slow machine either
    )
    async with running_suite(tmp_path_factory.mktemp("split"), options) as running:
        yield running


async def pools_of(suite: Suite, name: str) -> pb.GetPoolResponse:
    """Return what a manager counts, once it leads its group and has its worker."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(grpc.aio.AioRpcError):
                found = await suite.managers[name].GetPool(pb.GetPoolRequest(), timeout=PATIENCE, wait_for_ready=True)
                if found.pools:
                    return found
            await asyncio.sleep(0.02)


async def epochs(suite: Suite) -> dict[str, int]:
    return {name: (await pools_of(suite, name)).epoch for name in suite.managers}


async def until_idle(suite: Suite) -> None:
    """Wait until no manager has given a block of any worker to anybody."""
    async with asyncio.timeout(PATIENCE):
        while True:
            pools = [pool for name in suite.managers for pool in (await pools_of(suite, name)).pools]
            assert {pool.worker_id for pool in pools} == WORKERS
            if all(pool.free + pool.cached == pool.num_blocks for pool in pools):
                return
            await asyncio.sleep(0.05)


def long_prompts() -> list[list[int]]:
    """Return prompts that differ from their first block on, and are so long that a hit outweighs every other cost."""
    question, text = questions(1)[0].text, system_text()
    return [chat_tokens(question, f"{next(_NUMBERS)}: {text}") for _ in range(2 * SHARDS)]


def full_blocks(tokens: list[int]) -> int:
    """Return how many blocks of a prompt and its answer are computed: the last sampled token never is."""
    return (len(tokens) - 1) // 16


async def until_published(suite: Suite, index: Index, holders: Mapping[str, list[list[int]]]) -> None:
    """Wait until the index has each worker's blocks of these sequences, as routers read it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = [
                (await index.hits(tokens)).get(worker, 0) == full_blocks(tokens)
                for worker, all_tokens in holders.items()
                for tokens in all_tokens
            ]
            if all(found):
                return
            await asyncio.sleep(0.05)


async def hits_when_chosen(suite: Suite, tokens: list[int], worker: str) -> dict[str, int]:
    """Wait until the router would send a request to this worker; return the hits at all of them, by the index."""
    asked = decision_pb2.ExplainRequest(request=greedy(tokens, 1))
    async with asyncio.timeout(PATIENCE):
        while True:
            told = await suite.decisions.Explain(asked, timeout=PATIENCE)
            if told.index_answered and told.worker_id == worker:
                return {each.name: round(each.figures["hit_blocks"]) for each in told.workers}
            await asyncio.sleep(0.05)


async def cached_everywhere(suite: Suite) -> dict[str, list[list[int]]]:
    """Send prompts until every worker has served some; return them with their answers, by worker."""
    holders: dict[str, list[list[int]]] = {}
    async with asyncio.timeout(PATIENCE):
        while set(holders) != WORKERS:
            holders.clear()
            asked = long_prompts()
            tasks = await all_started(suite, asked, COUNT)
            for prompt, outcome in zip(asked, await asyncio.gather(*tasks), strict=True):
                assert outcome.admitted is not None
                holders.setdefault(outcome.admitted.worker_id, []).append(prompt + outcome.tokens)
    return holders


async def test_each_manager_has_its_worker_and_the_router_shows_one_pool(split: Suite) -> None:
    for number, name in enumerate(split.managers):
        assert [pool.worker_id for pool in (await pools_of(split, name)).pools] == [f"worker-{number}"]
    assert len(set((await epochs(split)).values())) == SHARDS
    holders = await cached_everywhere(split)
    operators = rpc.KvManagerServiceStub(split.admin)
    async with asyncio.timeout(PATIENCE):
        while True:
            whole = await operators.GetPool(pb.GetPoolRequest(), timeout=PATIENCE)
            managers = (await split.status()).managers
            if len(whole.pools) == SHARDS and sum(each.leads for each in managers) == SHARDS:
                break
            await asyncio.sleep(0.05)
    assert [pool.worker_id for pool in whole.pools] == sorted(WORKERS)
    assert list(whole.silent_groups) == []
    assert len({each.group for each in managers}) == SHARDS
    asked = decision_pb2.ListDecisionsRequest(from_manager=True, limit=1000)
    records = (await split.decisions.ListDecisions(asked, timeout=PATIENCE)).decisions
    assert {record.worker for record in records} == WORKERS
    assert set(holders) == WORKERS


async def test_a_router_that_knows_nothing_finds_the_hits_of_all_managers(split: Suite) -> None:
    holders = await cached_everywhere(split)
    identity = await identity_of(split)
    async with Redis.from_url(split.stack.redis_url) as redis:
        index = Index(split, redis, identity)
        await until_published(split, index, holders)
        slots = await index.owners()
        assert set(slots) == WORKERS
        assert len({slot for slot, _ in slots.values()}) == SHARDS
    kill(split, "router")
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if [each.state for each in (await split.status()).workers] == ["connected"] * SHARDS:
                    break
            await asyncio.sleep(0.05)
    for worker, all_tokens in holders.items():
        for tokens in all_tokens:
            hits = await hits_when_chosen(split, tokens, worker)
            again = await split.generate(greedy(tokens, 1))
            assert again.admitted is not None
            assert hits[worker] == full_blocks(tokens) > max(hits[each] for each in WORKERS - {worker})
            assert again.admitted.cached_tokens == 16 * hits[again.admitted.worker_id]
    await until_idle(split)


async def test_a_killed_manager_concerns_its_own_worker_alone(split: Suite) -> None:
    holders, before = await cached_everywhere(split), await epochs(split)
    identity = await identity_of(split)
    async with Redis.from_url(split.stack.redis_url) as redis:
        index = Index(split, redis, identity)
        await until_published(split, index, holders)
        owners = await index.owners()
        asked = 2 * prompts(16, seed=5)
        tasks = await all_started(split, asked, COUNT)
        kill(split, "kvmanager-2")
        outcomes = await asyncio.gather(*tasks)
        assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)
        await until_idle(split)
        after = await epochs(split)
        assert after.pop("kvmanager-2") > max(before.values())
        assert after == {name: epoch for name, epoch in before.items() if name != "kvmanager-2"}
        # A worker keeps its slot; the entries of the killed manager's worker have another generation.
        async with asyncio.timeout(PATIENCE):
            while (await index.owners())["worker-2"] == owners["worker-2"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        now = await index.owners()
        assert now.pop("worker-2")[0] == owners.pop("worker-2")[0]
        assert now == owners
        await until_published(split, index, holders)


async def test_every_manager_fills_a_wiped_redis_with_its_own_again(split: Suite) -> None:
    holders = await cached_everywhere(split)
    identity = await identity_of(split)
    async with Redis.from_url(split.stack.redis_url) as redis:
        index = Index(split, redis, identity)
        await until_published(split, index, holders)
        asked = prompts(16, seed=6)
        tasks = await all_started(split, asked, COUNT)
        await redis.flushall()
        outcomes = await asyncio.gather(*tasks)
        assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)
        await until_idle(split)
        await until_published(split, index, holders)
        slots = await index.owners()
        assert set(slots) == WORKERS
        assert len({slot for slot, _ in slots.values()}) == SHARDS
        fences = await redis.keys(index_format.fence_key(identity.namespace, "*"))
        assert len(fences) == SHARDS
        assert not await redis.exists(index_format.fence_key(identity.namespace))
