"""Background tasks of the router that end: health shows it, and they are begun again or the process ends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from common.backoff import Backoff
from common.contracts.index_format import DISCOVERY_WORKERS_KEY, DiscoveredWorker, discovered_to_value, discovery_key
from common.process.supervised import Restarts, Supervisor
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from router import main
from router.config import RouterSettings
from router.workers.pool import WorkerPool
from tests.router.test_process import CHECKPOINT, DEMO, address_in, healthy, router
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker, running
from tests.support.waiting import until

QUICK = Restarts(Backoff(first=0.01, longest=0.05), sound_after=0.2)


async def polled(redis: Redis) -> None:
    """Wait until somebody has read the set of workers."""
    await until(
        lambda: redis.info("commandstats"), lambda found: "cmdstat_srandmember" in found, every=0.02, seconds=PATIENCE_S
    )


async def test_a_member_of_redis_that_nobody_can_read_does_not_end_the_discovery_of_workers(
    redis_url: str, redis_client: Redis
) -> None:
    await redis_client.config_resetstat()
    await redis_client.sadd(DISCOVERY_WORKERS_KEY, b"\xff\xfe")
    worker = FakeWorker(identity=DEMO)
    async with running(worker), router("--redis-url", redis_url) as process:
        address = await address_in(process.stderr, "listening on ")
        await polled(redis_client)
        entry = DiscoveredWorker("w0", worker.address, worker.incarnation.hex(), DEMO)
        await redis_client.set(discovery_key("w0"), discovered_to_value(entry, None, 0.0))
        await redis_client.sadd(DISCOVERY_WORKERS_KEY, "w0")
        await redis_client.srem(DISCOVERY_WORKERS_KEY, b"\xff\xfe")
        async with open_channel(address) as channel:
            await healthy(channel, wanted=True)
            stub = rpc.InferenceServiceStub(channel)
            await until(
                lambda: stub.GetStatus(pb.GetStatusRequest()),
                lambda status: status.redis_connected,
                every=0.05,
                seconds=PATIENCE_S,
            )


@asynccontextmanager
async def started(monkeypatch: pytest.MonkeyPatch, worker: FakeWorker) -> AsyncIterator[tuple[main.RouterProcess, str]]:
    monkeypatch.setattr(main, "Supervisor", functools.partial(Supervisor, restarts=QUICK))
    settings = RouterSettings(
        model=CHECKPOINT, block_size=4, port=0, grpc_port=0, worker=(worker.address,), drain_timeout=1.0
    )
    process = main.RouterProcess(settings)
    where = await process.start()
    try:
        yield process, where.partition(",")[0]
    finally:
        await process.stop()


async def test_health_shows_a_vital_task_that_fails_and_one_that_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check, works = WorkerPool.check, asyncio.Event()
    works.set()

    def faulty(self: WorkerPool, late: float = 0.0) -> None:
        if not works.is_set():
            raise ZeroDivisionError("a bug")
        check(self, late)

    monkeypatch.setattr(WorkerPool, "check", faulty)
    # A task that has just begun again fails before it can count as sound.
    monkeypatch.setattr("router.workers.pool.WATCH_SECONDS", 0.0)
    worker = FakeWorker(identity=DEMO)
    async with running(worker), started(monkeypatch, worker) as (process, address), open_channel(address) as channel:
        await healthy(channel, wanted=True)
        works.clear()
        await healthy(channel, wanted=False)
        assert process.supervisor.failing == ("watch of hung workers",)
        assert not process._is_ready()
        works.set()
        await healthy(channel, wanted=True)
        assert process._is_ready()


async def test_a_router_whose_http_server_is_gone_has_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(identity=DEMO)
    async with running(worker), started(monkeypatch, worker) as (process, _):
        assert process._http is not None
        process._http._server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await process.supervisor.lost.wait()
