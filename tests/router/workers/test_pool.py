"""What the pool does when its own side fails: the worker's stream is opened again, and the bug is logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from common.backoff import Backoff
from common.clock import SystemClock
from router.workers.client import Pacing, RouterIdentity
from router.workers.pool import WorkerPool
from tests.support.router.fake_worker import IDENTITY, FakeWorker, running

QUICK = Pacing(Backoff(first=0.01, longest=0.05, jitter=0.5))


class Faulty:
    """A listener with a bug that shows once, when a worker has connected."""

    def __init__(self) -> None:
        self.bugs = [asyncio.InvalidStateError("a result twice")]

    def capacity_changed(self) -> None:
        if self.bugs:
            raise self.bugs.pop()

    def cache_lost(self, worker_id: str) -> None:
        """Nothing is cached."""


async def test_a_bug_is_logged_as_what_it_is_and_costs_a_stream_but_no_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = FakeWorker()
    async with running(double):
        pool = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, SystemClock(), QUICK)
        pool.listen(Faulty())
        pool.add(double.address)
        await double.until(lambda: double.streams == 2)
        await pool.aclose()
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.exc_info is not None
    assert str(logged.exc_info[1]) == "a result twice"
