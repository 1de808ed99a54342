"""Counters on the router's wires, at the ends of their ranges."""

from __future__ import annotations

import asyncio

import pytest

from common.contracts.errors import QuireError
from common.contracts.limits import MAX_HANDLE
from common.contracts.types import FinishReason, SamplingParams
from router.placement.adapters import WorkerAdapters
from router.placement.worker_model import Load
from router.workers.client import RouterIdentity, WorkerClient
from router.workers.codec import Submission, WorkerFacts
from router.workers.worker_events import Lost, Refused, SequenceEvent, SequenceFinished
from tests.support.gpuworker.fake_engine_ports import InstantRunner
from tests.support.gpuworker.worker_harness import served

PATIENCE_S = 60.0
# No block hashes, so that only handles matter here.
SUBMISSION = Submission("r", 0, (1, 2, 3), (), bytes(32), SamplingParams(temperature=0.0, max_tokens=2), no_cache=True)


class Connected:
    """A listener that is set once the worker has said hello."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def connected(self, client: WorkerClient, facts: WorkerFacts) -> None:
        self.event.set()

    def heartbeat(self, client: WorkerClient, load: Load) -> None: ...

    def adapters_changed(self, client: WorkerClient, adapters: WorkerAdapters) -> None:
        """The worker has none."""

    def disconnected(self, client: WorkerClient, error: QuireError) -> None: ...


class End:
    """A sink that waits for the end of its sequence."""

    def __init__(self) -> None:
        self.came: asyncio.Future[SequenceEvent] = asyncio.get_running_loop().create_future()

    def __call__(self, event: SequenceEvent) -> None:
        if isinstance(event, SequenceFinished | Refused | Lost):
            self.came.set_result(event)


@pytest.fixture
def connected() -> Connected:
    return Connected()


async def test_handles_of_a_stream_do_not_end_with_signed_32_bits(connected: Connected) -> None:
    async with served(InstantRunner()) as worker:
        client = WorkerClient(worker.address, RouterIdentity("router", b"i" * 16), connected)
        task = asyncio.create_task(client.run())
        async with asyncio.timeout(PATIENCE_S):
            await connected.event.wait()
            client._last_handle = MAX_HANDLE - 4
            handles = []
            for _ in range(8):
                end = End()
                handles.append(client.submit_sequence(SUBMISSION, end))
                ended = await end.came
                assert isinstance(ended, SequenceFinished), ended
                assert ended.reason is FinishReason.LENGTH
        assert handles == [MAX_HANDLE - 3, MAX_HANDLE - 2, MAX_HANDLE - 1, MAX_HANDLE, 1, 2, 3, 4]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
