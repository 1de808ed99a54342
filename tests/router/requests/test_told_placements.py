"""A router avoids the worker that another one has just filled, before a heartbeat shows it: real Redis and streams."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from common.contracts.clock import SystemClock
from common.contracts.types import BlockHash
from common.decisions.ring import DecisionRing
from common.process.redis_client import open_redis
from router.placement.placement_request import PlacementRequest
from router.placement.routing import OTHERS_CHANGED, Router
from router.placement.shared_load import SharedLoad
from router.requests.dispatcher import Dispatcher, Job, Placement
from router.workers.client import RouterIdentity
from router.workers.load_sharing import LoadSharing
from router.workers.pool import WorkerPool
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S, FakeWorker
from tests.support.router.frontend_harness import QUICK, FixedIndex
from tests.support.waiting import until

CLOCK = SystemClock()
PROMPT = [BlockHash(bytes([number] * 16)) for number in range(25)]


class Side:
    """A router with a stream of its own to each of two workers, whose heartbeats say that they are idle."""

    def __init__(self, name: str, redis_url: str, hits: Mapping[str, int]) -> None:
        ids = itertools.count(1)
        self.redis, self.decisions = open_redis(redis_url, PATIENCE_S), DecisionRing(100)
        self.pool = WorkerPool(RouterIdentity(name, name.encode() * 8), IDENTITY, CLOCK, QUICK)
        shared = SharedLoad(name.encode() * 8)
        self.sharing = LoadSharing(self.redis, self.pool, shared, CLOCK)
        self.pool.share_load(shared)
        chooser = Router(CLOCK, lambda: f"{name}-{next(ids)}", seed=1)
        self.dispatcher = Dispatcher(self.pool, chooser, FixedIndex(hits), self.decisions, CLOCK, PATIENCE_S)
        self.workers = [FakeWorker(worker_id=f"w{number}", incarnation=b"i" * 16) for number in range(2)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Side]:
        try:
            for worker in self.workers:
                await worker.start()
                self.pool.add_worker(worker.address)
            await until(lambda: len(self.pool.models()) == 2, every=0, seconds=PATIENCE_S)
            yield self
        finally:
            await self.pool.aclose()
            for worker in self.workers:
                await worker.kill()
            await self.redis.aclose()

    async def place(self) -> Placement:
        wanted = PlacementRequest("r", prompt_tokens=100, max_len=120, max_tokens=20)
        return await self.dispatcher.place_job(Job(wanted, PROMPT, 0, None), self.dispatcher.ticket(0))


async def exchange(*sides: Side) -> None:
    """Let each router tell, and hear what the ones before it told."""
    for side in sides:
        await side.sharing.exchange()


@pytest.fixture
async def sides(redis_url: str) -> AsyncIterator[tuple[Side, Side]]:
    """Two routers; both know that w0 has 8 tokens of each prompt, so that alone they choose it."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(Side(name, redis_url, {"w0": 2}).running()) for name in ("a", "b")
        ]
        yield first, second


async def test_the_second_router_avoids_the_worker_that_the_first_one_has_just_filled(sides: tuple[Side, Side]) -> None:
    first, second = sides
    placed = await first.place()
    assert (placed.worker_id, placed.decision.reasons) == ("w0", ())
    await exchange(first, second)
    elsewhere = await second.place()
    assert elsewhere.worker_id == "w1"
    (reason,) = elsewhere.decision.reasons
    assert reason.startswith(f"{OTHERS_CHANGED} w0: they add ")
    assert list(second.decisions) == [elsewhere.decision]


async def test_what_has_left_again_counts_no_more(sides: tuple[Side, Side]) -> None:
    first, second = sides
    placed = await first.place()
    await exchange(first, second)
    placed.reservations[0].release()
    await exchange(first, second)
    assert (await second.place()).worker_id == "w0"


async def test_without_news_both_choose_the_same_worker(sides: tuple[Side, Side]) -> None:
    first, second = sides
    assert [(await side.place()).worker_id for side in (first, second)] == ["w0", "w0"]


async def test_what_is_at_a_lost_worker_is_told_to_be_over(sides: tuple[Side, Side]) -> None:
    first, second = sides
    await first.place()
    await exchange(first, second)
    await first.workers[0].kill()
    await until(lambda: len(first.pool.models()) == 1, every=0, seconds=PATIENCE_S)
    await exchange(first, second)
    assert (await second.place()).worker_id == "w0"
