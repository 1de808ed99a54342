"""Incidents between two workers and the index: `quire why` names the true cause in its first three lines."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.process.local_redis import LocalRedis
from quire.inference.v1 import inference_pb2 as pb
from tests.support.index_view import Index, identity_of
from tests.support.load import kill, manager_stopped
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import head_of, outcome_of, until_blamed, until_placed

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2
# A pause of Redis ends when a test ends it; a test is given less time than this.
PAUSE_MS = 3_600_000
# The request that came when no worker stood in the index.
FIRST = "incident-first"
names = (f"incident-{number:04}" for number in itertools.count())
_random = random.Random(19)


@pytest.fixture(scope="module")
def index() -> Iterator[LocalRedis]:
    """A Redis of this file's own, which lets a test hold back all writes."""
    with LocalRedis() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory, index: LocalRedis) -> AsyncIterator[Suite]:
    """Two simulated workers of 512 blocks, whose paces the router knows."""
    flags = ("--kv-blocks", "512", "--simulate", "base=4ms,prefill=400us")
    options = StackOptions(
        model=CHECKPOINT,
        workers=WORKERS,
        worker_flags=flags,
        router_flags=("--index-timeout", "2"),
        redis_url=index.url,
    )
    async with running_suite(tmp_path_factory.mktemp("workers"), options) as running:
        first = named(prompt(800), 8)
        first.request_id = FIRST
        await running.generate(first)
        await asyncio.gather(*(running.generate(named(prompt(800), 8)) for _ in range(4)))
        await running.until_all_free(WORKERS)
        yield running


def prompt(tokens: int) -> list[int]:
    """Return a prompt that no other test has."""
    return _random.choices(range(100, 400), k=tokens)


def named(tokens: list[int], max_tokens: int = 2) -> pb.GenerateRequest:
    request = greedy(tokens, max_tokens)
    request.request_id = next(names)
    return request


def worker_of(outcome: Outcome) -> str:
    assert outcome.admitted is not None
    return outcome.admitted.worker_id


async def until_index_answers(suite: Suite) -> None:
    """Wait until the router reads in Redis again after an outage.

    The prompts are others than a test's own: without an answer the router may send an equal one to another worker.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            request = named(prompt(32))
            await suite.generate(request)
            if (await outcome_of(suite, request)).get("index_answered"):
                return
            await asyncio.sleep(0.02)


async def until_indexed(suite: Suite, index: LocalRedis, tokens: list[int], holder: str) -> None:
    """Wait until Redis has a worker's blocks of a prompt."""
    async with Redis.from_url(index.url) as redis:
        view = Index(suite, redis, await identity_of(suite))

        async def indexed() -> bool:
            return (await view.hits(tokens)).get(holder) == len(tokens) // 16

        await until(indexed, seconds=PATIENCE)


def lives(suite: Suite, name: str) -> int:
    """Return how often a process has become ready."""
    return sum(line.startswith(f"{name}: READY ") for line in suite.lines)


async def killed(suite: Suite, name: str) -> None:
    """Kill a worker, and return when the router uses its successor.

    What the router says of a state may be older than the kill, but a heartbeat younger than the successor is its own.
    """
    clock, before = asyncio.get_running_loop().time, lives(suite, name)
    kill(suite, name)
    async with asyncio.timeout(PATIENCE):
        await until(lambda: lives(suite, name) != before, seconds=PATIENCE)
        began = clock()
        while True:
            young = [each for each in (await suite.status()).workers if each.heartbeat_age < clock() - began]
            if [each.state for each in young if each.worker_id == name] == ["connected"]:
                return
            await asyncio.sleep(0.02)


async def test_incident_a_hot_worker_against_a_hit(suite: Suite) -> None:
    """The worker that holds the prefix has a long prompt to compute; without the prefix the other one is done sooner.

    No prompt begins before both are placed. On a busy machine one worker may look slow; then others are sent.
    """
    while True:
        shared = prompt(1200)
        holder = worker_of(await suite.generate(named(shared)))
        huge, small = named(shared + prompt(2800), 2), named(shared + prompt(16))
        async with manager_stopped(suite):
            tasks = [asyncio.create_task(suite.generate(huge))]
            first = await until_placed(suite, huge)
            tasks.append(asyncio.create_task(suite.generate(small)))
            second = await until_placed(suite, small)
        await asyncio.gather(*tasks)
        if first == holder != second:
            break
    head = await head_of(suite, small.request_id)
    assert f"{holder} holds 1,200 tokens of it and was busy: predicted " in head
    assert "queue delay" in head


async def test_incident_the_index_has_no_worker_yet(suite: Suite) -> None:
    head = await head_of(suite, FIRST)
    assert "0 of 800 prompt tokens were cached: no worker had its first 16 tokens; worker-" in head
    assert "Redis" not in head


async def test_incident_redis_stands_still(suite: Suite, index: LocalRedis) -> None:
    """A look-up costs its limit. After some of them the router makes no more for a while, and says so."""
    os.kill(index.pid, signal.SIGSTOP)
    try:
        slow = named(prompt(32))
        await suite.generate(slow)
        slow_head = await head_of(suite, slow.request_id)
        async with asyncio.timeout(PATIENCE):
            head = ""
            while "the router did not ask Redis" not in head:
                await asyncio.gather(*(suite.generate(named(prompt(32))) for _ in range(3)))
                request = named(prompt(400))
                await suite.generate(request)
                head = await head_of(suite, request.request_id)
    finally:
        os.kill(index.pid, signal.SIGCONT)
    late = "the prefix index in Redis did not answer within 2.0 s, and the router went on without it"
    assert f"to the first token: {late}." in slow_head
    assert f"0 of 32 prompt tokens were cached: {late}, so the router could not know who holds it" in slow_head
    assert re.search(r"the router did not ask Redis \(\d+ look-ups in a row failed in the [\d.]+ m?s before, ", head)
    assert "the last one: no answer within 2.0 s), so the router could not know who holds it; worker-" in head


async def test_incident_a_stale_index_after_a_workers_restart(suite: Suite, index: LocalRedis) -> None:
    """Redis takes no writes meanwhile, so the index has what the worker held in its former life.

    On a busy machine the new worker may look slow, and the request goes to the other one; then another prompt is tried.
    """
    await until_index_answers(suite)
    async with asyncio.timeout(PATIENCE), Redis.from_url(index.url) as redis:
        while True:
            tokens = prompt(1600)
            holder = worker_of(await suite.generate(named(tokens)))
            await until_indexed(suite, index, tokens, holder)
            await redis.client_pause(PAUSE_MS, all=False)
            try:
                await killed(suite, holder)
                request = named(tokens)
                outcome = await suite.generate(request)
            finally:
                await redis.client_unpause()
            if worker_of(outcome) == holder:
                break
            await until_index_answers(suite)
    head = await head_of(suite, request.request_id)
    assert f"{holder} was expected to hold 1,584 tokens and did not, because the index was stale." in head
    await suite.until_all_free(WORKERS)


async def test_incident_a_worker_was_killed_before_its_grant(suite: Suite) -> None:
    """The manager stands still until the worker is dead. The request has waited longer by then than its work takes."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await suite.generate(named(prompt(400)))
    held = 5 * (clock() - began)

    async def loses_its_worker(times: int) -> str:
        request = named(prompt(400))
        async with manager_stopped(suite):
            task = asyncio.create_task(suite.generate(request))
            victim = await until_placed(suite, request)
            await asyncio.wait([task], timeout=times * held)
            kill(suite, victim)
        await task
        await suite.until_connected(WORKERS)
        await suite.until_all_free(WORKERS)
        head = await head_of(suite, request.request_id)
        return head if f"it lost {victim} (" in head else ""

    head = await until_blamed("to the first token: it lost ", loses_its_worker)
    assert "to the first token: it lost " in head
    assert "quiresequencesmove" in head


async def test_incident_a_worker_was_killed(suite: Suite) -> None:
    """The prompt was cached at the worker that dies, and is computed as a whole at the other one."""
    for output in itertools.chain((40, 80, 160), itertools.repeat(320)):
        tokens = prompt(3200)
        await suite.generate(named(tokens))
        moved, first, outcome = named(tokens, output), asyncio.Event(), Outcome()
        task = asyncio.create_task(suite.generate(moved, first_token=first, outcome=outcome))
        async with asyncio.timeout(PATIENCE):
            await first.wait()
        victim = worker_of(outcome)
        await killed(suite, victim)
        await task
        if (await outcome_of(suite, moved)).get("moves"):
            break  # otherwise it had ended before the kill
    head = await head_of(suite, moved.request_id)
    assert f"it lost {victim} (" in head
    assert "quiresequencesmove" in head
    await suite.until_all_free(WORKERS)
