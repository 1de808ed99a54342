"""The router's connection to a worker, and what a test waits for at its ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from common.backoff import Backoff
from common.contracts.errors import QuireError
from common.contracts.types import SamplingParams
from router.placement.adapters import WorkerAdapters
from router.placement.worker_model import Load
from router.workers.client import Pacing, RouterIdentity, WorkerClient
from router.workers.codec import Submission, WorkerFacts
from router.workers.worker_events import SequenceEvent
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker

QUICK = Pacing(Backoff(first=0.01, longest=0.05, jitter=0.5), hello=PATIENCE_S)
SUBMISSION = Submission("r1", 0, (1, 2, 3, 4, 5), (), b"r" * 32, SamplingParams(max_tokens=3), eos_token_ids=(7,))


class Listener:
    """Records what the client reports, and lets a test wait for it."""

    def __init__(self) -> None:
        self.facts: list[WorkerFacts] = []
        self.loads: list[Load] = []
        self.errors: list[QuireError] = []
        self.refuse_with: QuireError | None = None
        self._changed = asyncio.Event()

    def connected(self, client: WorkerClient, facts: WorkerFacts) -> None:
        if self.refuse_with is not None:
            raise self.refuse_with
        self.facts.append(facts)
        self._changed.set()

    def heartbeat(self, client: WorkerClient, load: Load) -> None:
        self.loads.append(load)
        self._changed.set()

    def adapters_changed(self, client: WorkerClient, adapters: WorkerAdapters) -> None:
        self.adapters = adapters
        self._changed.set()

    def disconnected(self, client: WorkerClient, error: QuireError) -> None:
        self.errors.append(error)
        self._changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self._changed.clear()
                await self._changed.wait()


class Inbox:
    """A sink that a test can read from."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self.put = self._events.put_nowait

    async def next(self) -> SequenceEvent:
        async with asyncio.timeout(PATIENCE_S):
            return await self._events.get()

    @property
    def empty(self) -> bool:
        return self._events.empty()


class running_client:  # noqa: N801
    """Runs a client until the end of the block."""

    def __init__(self, worker: FakeWorker, listener: Listener, pacing: Pacing = QUICK) -> None:
        self._client = WorkerClient(worker.address, RouterIdentity("router", b"i" * 16), listener, pacing)

    async def __aenter__(self) -> WorkerClient:
        self._task = asyncio.create_task(self._client.run())
        return self._client

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
