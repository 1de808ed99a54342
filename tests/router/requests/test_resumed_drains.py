"""A request that was resumed at this router moves from a draining worker like any other."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.router.requests.test_resuming import resume, resumed, wanted, world
from tests.support.gpuworker.worker_harness import IDENTITY
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import nothing_left, tokens_of


async def test_a_resumed_request_leaves_a_worker_that_drains() -> None:
    other = FakeWorker("w1", identity=IDENTITY)
    await other.start()
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(), 4)
        await whole.dies(first)
        task = asyncio.create_task(resumed(second, resume(len(tokens_of(seen)))))
        try:
            runs = second.frontend._runs
            await second.until(lambda: any(each.client for run in runs for each in run.sequences))
            second.pool.add(other.address)
            await second.connected(2)
            whole.worker.servicer.drain(migrate=True)
            models = second.pool.models
            await second.until(lambda: any(each.worker_id == "w1" and each.outstanding for each in models()))
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert nothing_left(second)
        await other.kill()
