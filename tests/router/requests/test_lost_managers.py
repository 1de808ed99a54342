"""What becomes of requests at a worker whose KV manager is gone for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.contracts.errors import Unavailable
from common.contracts.types import FinishReason
from router.placement.worker_model import WorkerState
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import Harness, frontend_over, in_background, request, tokens_of


@asynccontextmanager
async def watched(harness: Harness) -> AsyncIterator[None]:
    """Check the workers all the time."""

    async def watch() -> None:
        while True:
            harness.pool.check()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def test_a_stream_that_cannot_go_on_ends_with_the_reason_and_the_router_is_not_ready() -> None:
    worker = FakeWorker()
    async with frontend_over(worker, patience=0.05, manager_patience=0.2) as harness, watched(harness):
        async with in_background(harness, request()) as task:
            await worker.until(lambda: len(worker.submits) == 1)
            worker.step({1: [100]}, admitted={1: 0})
            worker.heartbeat(manager_attached=False)
            with pytest.raises(Unavailable, match="is detached: it has had no KV manager for"):
                await task
            assert tokens_of(harness.seen) == [100]
        await worker.until(lambda: [each.handle for each in worker.cancels] == [1])
        assert not harness.pool.usable
        assert harness.pool.trouble() == "no worker takes requests: 1 without a KV manager"
        with pytest.raises(Unavailable, match="no KV manager"):
            await harness.events(request())
        worker.heartbeat(manager_attached=True)
        await harness.until(lambda: harness.pool.usable)
        assert harness.pool.trouble() == ""


async def test_a_silent_stream_goes_to_another_worker_also_when_its_own_drains() -> None:
    """The drain is shown as the worker's state; the time without a manager counts all the same."""
    alone, other = FakeWorker(), FakeWorker(worker_id="w1", automatic=True)
    async with frontend_over(alone, manager_patience=0.2) as harness, watched(harness):
        async with in_background(harness, request()) as task:
            await alone.until(lambda: len(alone.submits) == 1)
            await other.start()
            alone.step({1: [100]}, admitted={1: 0})
            harness.pool.add_worker(other.address)
            await harness.connected(2)
            alone.heartbeat(manager_attached=False, draining=True)
            assert tokens_of(await task) == [100, 101, 102]
        assert WorkerState.DRAINING in [member.state for member in harness.pool.members()]
        await other.kill()


async def test_a_silent_stream_goes_on_at_a_worker_that_has_a_manager() -> None:
    alone, other = FakeWorker(), FakeWorker(worker_id="w1", automatic=True)
    async with frontend_over(alone, manager_patience=0.2) as harness, watched(harness):
        async with in_background(harness, request()) as task:
            await alone.until(lambda: len(alone.submits) == 1)
            await other.start()
            alone.step({1: [100]}, admitted={1: 0})
            harness.pool.add_worker(other.address)
            await harness.connected(2)
            alone.heartbeat(manager_attached=False)
            assert tokens_of(await task) == [100, 101, 102]
        await other.kill()


async def test_a_stream_that_gets_tokens_goes_on_without_a_manager() -> None:
    worker = FakeWorker()
    async with frontend_over(worker, manager_patience=0.2) as harness, in_background(harness, request()) as task:
        await worker.until(lambda: len(worker.submits) == 1)
        worker.heartbeat(manager_attached=False)
        await harness.until(lambda: harness.pool.models()[0].detached_at is not None)
        await harness.until(lambda: not harness.pool.usable)
        worker.step({1: [100]}, admitted={1: 0})
        await harness.until(lambda: tokens_of(harness.seen) == [100])
        (member,) = harness.pool.members()
        member.client.abandon_silent(3600.0, "too long")
        worker.step({1: [101]})
        worker.step({1: [102]}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100, 101, 102]
