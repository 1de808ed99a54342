"""Real processes are killed under load: the KV manager, Redis, a worker. Streams continue, and no token changes."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis
from redis.asyncio import Redis

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2
from tests.support.load import all_started, epoch, kill, prompts, started
from tests.support.reference import assert_greedy
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

COUNT = 96
FLAGS = ("--kv-blocks", "2048", "--dtype", "float32")


async def until_redis_is_back(suite: Suite) -> None:
    """Wait until the supervised Redis answers again, on its port; fail when it never does."""
    async with Redis.from_url(suite.stack.redis_url) as client, asyncio.timeout(PATIENCE):
        while True:
            with suppress(redis.ConnectionError):
                if await client.ping():
                    return
            await asyncio.sleep(0.05)


async def test_a_killed_manager_breaks_none_of_64_streams(tmp_path: Path) -> None:
    options = StackOptions(model=CHECKPOINT, workers=1, worker_flags=FLAGS)
    asked = 4 * prompts(16)
    async with running_suite(tmp_path, options) as suite:
        before = await epoch(suite)
        tasks = await all_started(suite, asked, COUNT)
        kill(suite, "kvmanager")
        outcomes = await asyncio.gather(*tasks)
        assert await epoch(suite) > before
        # All sequences are accounted for: those that ended without a manager, and those that continued.
        await suite.until_all_free(workers=1)
        again = await suite.generate(greedy(asked[1], 8))
        assert again.admitted is not None
        assert again.admitted.cached_tokens > 0, "what was sealed before the crash is still cached after it"
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)


async def test_redis_killed_and_back_fails_no_request(tmp_path: Path) -> None:
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=FLAGS)
    asked = prompts(8)
    async with running_suite(tmp_path, options) as suite:
        first = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))
        kill(suite, "redis")
        second = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))
        await until_redis_is_back(suite)
        third = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in asked))
        await suite.until_all_free(workers=2)
    assert [o.tokens for o in first] == [o.tokens for o in second] == [o.tokens for o in third]


async def until_all_wait(suite: Suite, count: int) -> None:
    """Return when the only worker has `count` sequences, none of which has blocks."""
    async with asyncio.timeout(PATIENCE):
        while True:
            status = await suite.inference.GetStatus(inference_pb2.GetStatusRequest(), timeout=PATIENCE)
            (worker,) = status.workers
            if (worker.running_sequences, worker.waiting_sequences) == (0, count):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def manager_stopped(suite: Suite) -> AsyncIterator[None]:
    """Stop the KV manager: the worker accepts sequences, and starts none before the manager grants blocks again."""
    kill(suite, "kvmanager", signal.SIGSTOP)
    try:
        yield
    finally:
        kill(suite, "kvmanager", signal.SIGCONT)


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


async def test_streams_outlive_a_killed_worker_and_its_successor_is_used(tmp_path: Path) -> None:
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=FLAGS)
    asked = prompts(16, seed=5)
    async with running_suite(tmp_path, options) as suite:
        tasks = await all_started(suite, asked, COUNT)
        kill(suite, "worker-1")
        outcomes = await asyncio.gather(*tasks)
        placed = [outcome.admitted.worker_id for outcome in outcomes if outcome.admitted]
        assert set(placed) == {"worker-0", "worker-1"}
        await suite.until_all_free(workers=2)  # the second is the successor, attached anew
        async with asyncio.timeout(PATIENCE):
            while True:
                status = await suite.inference.GetStatus(inference_pb2.GetStatusRequest(), timeout=PATIENCE)
                if sum(worker.state == "connected" for worker in status.workers) == 2:
                    break
                await asyncio.sleep(0.05)
        later = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in prompts(16, seed=6)))
        assert {outcome.admitted.worker_id for outcome in later if outcome.admitted} == {"worker-0", "worker-1"}
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)


async def test_a_worker_that_joins_is_found_through_redis(tmp_path: Path) -> None:
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=FLAGS, named_workers=1)
    async with running_suite(tmp_path, options) as suite:
        outcomes = await asyncio.gather(*(suite.generate(greedy(prompt, 24)) for prompt in prompts(24, seed=8)))
        assert {outcome.admitted.worker_id for outcome in outcomes if outcome.admitted} == {"worker-0", "worker-1"}
        await suite.stack.children["worker-1"].stop()
        left = await asyncio.gather(*(suite.generate(greedy(prompt, 8)) for prompt in prompts(8, seed=9)))
        assert {outcome.admitted.worker_id for outcome in left if outcome.admitted} == {"worker-0"}


def constrained(prompt: list[int], seed: int) -> inference_pb2.GenerateRequest:
    """Return a request at random temperature whose whole output must match; some hundred tokens."""
    request = greedy(prompt, 200)
    request.sampling.temperature, request.sampling.seed, request.regex = 1.0, seed, CODES
    return request


CODES = "([a-z]{2}[0-9]{3} ){30}"


async def test_constraints_are_followed_on_by_another_worker(tmp_path: Path) -> None:
    """The new worker first consumes the earlier output: the text is the same as from an undisturbed run."""
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=FLAGS)
    requests = [constrained(prompt, seed) for seed, prompt in enumerate(prompts(16, seed=7))]
    async with running_suite(tmp_path, options) as suite:
        tasks = await started(suite, requests)
        kill(suite, "worker-1")
        disturbed = await asyncio.gather(*tasks)
        await suite.until_all_free(workers=2)
        undisturbed = await asyncio.gather(*map(suite.generate, requests[:6]))
    assert {outcome.admitted.worker_id for outcome in disturbed if outcome.admitted} == {"worker-0", "worker-1"}
    assert [outcome.tokens for outcome in disturbed[:6]] == [outcome.tokens for outcome in undisturbed]
    assert all(re.fullmatch(CODES, outcome.text) for outcome in disturbed)
