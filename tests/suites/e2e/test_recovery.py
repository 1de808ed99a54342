"""Real processes are killed under load: the KV manager, Redis, a worker. Streams continue, and no token changes."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2
from tests.suites.e2e.conftest import WORKERS
from tests.support.load import (
    all_started,
    epoch,
    kill,
    manager_stopped,
    placed,
    prompts,
    until_all_wait,
    until_used,
    with_a_worker_killed,
)
from tests.support.reference import assert_greedy
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

COUNT = 96

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until_redis_is_back(suite: Suite) -> None:
    """Wait until the supervised Redis answers again, on its port; fail when it never does."""
    async with Redis.from_url(suite.stack.redis_url) as client, asyncio.timeout(PATIENCE):
        while True:
            with suppress(redis.ConnectionError):
                if await client.ping():
                    return
            await asyncio.sleep(0.05)


async def test_a_killed_manager_breaks_none_of_64_streams(suite: Suite) -> None:
    asked = 4 * prompts(16)
    before = await epoch(suite)
    tasks = await all_started(suite, asked, COUNT)
    kill(suite, "kvmanager")
    outcomes = await asyncio.gather(*tasks)
    assert await epoch(suite) > before
    # All sequences are accounted for: those that ended without a manager, and those that continued.
    await suite.until_all_free(WORKERS)
    again = await suite.generate(greedy(asked[1], 8))
    assert again.admitted is not None
    assert again.admitted.cached_tokens > 0, "what was sealed before the crash is still cached after it"
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)


async def test_redis_killed_and_back_fails_no_request(suite: Suite) -> None:
    asked = prompts(8)
    first = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))
    kill(suite, "redis")
    second = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))
    await until_redis_is_back(suite)
    third = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))
    await suite.until_all_free(WORKERS)
    assert [o.tokens for o in first] == [o.tokens for o in second] == [o.tokens for o in third]


@pytest.mark.rest  # a suite of its own
async def test_preemption_changes_no_token(tmp_path: Path) -> None:
    """All sequences start together, however fast the machine is; the pool holds a part of them at full length."""
    options = StackOptions(model=CHECKPOINT, workers=1, worker_flags=("--kv-blocks", "160", "--dtype", "float32"))
    asked = 2 * prompts(12, seed=3)
    async with running_suite(tmp_path, options) as suite:
        async with manager_stopped(suite):
            tasks = [asyncio.create_task(suite.generate(greedy(prompt, 120))) for prompt in asked]
            await until_all_wait(suite, len(asked))
        outcomes = await asyncio.gather(*tasks)
        await suite.until_all_free(workers=1)
        (pool,) = await suite.pools()
    assert pool.preemptions > 0
    assert sum(outcome.finished.usage.preemptions for outcome in outcomes if outcome.finished) == pool.preemptions
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], 120)


async def test_streams_outlive_a_killed_worker_and_its_successor_is_used(suite: Suite) -> None:
    asked = prompts(16, seed=5)
    victim, outcomes = await with_a_worker_killed(suite, [greedy(prompt, COUNT) for prompt in asked])
    await suite.until_all_free(WORKERS)  # one of them is the successor, attached anew
    await suite.until_connected(WORKERS)
    await until_used(suite, victim)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)


@pytest.mark.rest  # a suite of its own
async def test_a_worker_that_joins_is_found_through_redis(tmp_path: Path) -> None:
    flags = ("--kv-blocks", "1024", "--simulate", "base=4ms,prefill=10us")
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=flags, named_workers=1)
    async with running_suite(tmp_path, options) as suite:
        for name in ("worker-0", "worker-1"):
            await until_used(suite, name)
        await suite.stack.children["worker-1"].stop()
        left = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in prompts(8, seed=9)))
        assert placed(left) == {"worker-0"}


def constrained(prompt: list[int], seed: int) -> inference_pb2.GenerateRequest:
    """Return a request at random temperature whose whole output must match; some hundred tokens."""
    request = greedy(prompt, 200)
    request.sampling.temperature, request.sampling.seed, request.regex = 1.0, seed, CODES
    return request


CODES = "([a-z]{2}[0-9]{3} ){30}"


async def test_constraints_are_followed_on_by_another_worker(suite: Suite) -> None:
    """The new worker first consumes the earlier output: the text is the same as from an undisturbed run."""
    requests = [constrained(prompt, seed) for seed, prompt in enumerate(prompts(16, seed=7))]
    _, disturbed = await with_a_worker_killed(suite, requests)
    await suite.until_all_free(WORKERS)
    undisturbed = await asyncio.gather(*map(suite.generate, requests[:6]))
    await suite.until_connected(WORKERS)
    assert [outcome.tokens for outcome in disturbed[:6]] == [outcome.tokens for outcome in undisturbed]
    assert all(re.fullmatch(CODES, outcome.text) for outcome in disturbed)
