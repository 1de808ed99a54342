"""A connection of a router to a fake worker on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from router.workers.client import WorkerClient
from tests.support.router.client_harness import Listener, running_client
from tests.support.router.fake_worker import FakeWorker, running


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    double = FakeWorker()
    async with running(double):
        yield double


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def client(worker: FakeWorker, listener: Listener) -> AsyncIterator[WorkerClient]:
    """A client whose stream is open."""
    async with running_client(worker, listener) as opened:
        await listener.until(lambda: bool(listener.facts))
        yield opened
