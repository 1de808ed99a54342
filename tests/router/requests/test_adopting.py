"""What ends a resumed request while its worker says nothing about the adoption: a test holds the worker's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest

from common.contracts.errors import Cancelled, DeadlineExceeded, NotFound, QuireError, Unauthenticated, Unavailable
from gpuworker.server.router_stream import RouterStream
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from router.contracts.events import GenerateEvent
from router.contracts.ports import CallContext
from router.requests import frontend
from router.requests.resumption import Resumption
from tests.router.requests.test_resuming import ANA, LONG, World, resume, wanted, world
from tests.support.gpuworker.worker_harness import PATIENCE
from tests.support.router.frontend_harness import CLOCK, Harness, until_nothing_left


@dataclass
class Held:
    """A request whose adoption the worker has read and not answered."""

    whole: World
    router: Harness
    task: asyncio.Task[list[GenerateEvent]]
    adoption: worker_pb.Adopt
    refuse: Callable[[], None]

    async def error(self) -> QuireError:
        """Return the error with which the request ends, though the worker still says nothing."""
        with pytest.raises(QuireError) as caught:
            async with asyncio.timeout(PATIENCE):
                await self.task
        return caught.value


@asynccontextmanager
async def silent(sequences: int = 1, lets_pass: int = 0, seconds: float | None = None) -> AsyncIterator[Held]:
    """Resume a request at a worker that answers so many adoptions, and holds the next one.

    At the end the worker must have read a cancel for each adoption that it did not refuse. At the router nothing may be
    left.
    """
    adoptions: list[worker_pb.Adopt] = []
    cancelled: list[int] = []
    async with world() as whole:
        first, second = await whole.router(), await whole.router()
        await whole.begun(first, wanted(n=sequences), 2)
        await whole.dies(first)
        streams: list[RouterStream] = []
        refused: list[worker_pb.Adopt] = []
        answer, cancel = whole.worker.servicer._adopt, RouterStream.cancel

        def adopt(stream: RouterStream, message: worker_pb.Adopt) -> None:
            adoptions.append(message)
            streams.append(stream)
            if len(adoptions) <= lets_pass:
                answer(stream, message)

        def note(stream: RouterStream, message: worker_pb.Cancel) -> None:
            cancelled.append(message.handle)
            cancel(stream, message)

        def refuse() -> None:
            refused.append(adoptions[-1])
            answer(streams[-1], adoptions[-1])

        whole.worker.servicer._adopt = adopt  # type: ignore[method-assign]
        deadline = None if seconds is None else CLOCK.monotonic() + seconds
        call = CallContext(CLOCK.monotonic(), caller=ANA, deadline=deadline)
        resumption = Resumption(second.pool, CLOCK, 0.0, answer_seconds=PATIENCE)
        found = await resumption.find(resume(*[2] * sequences), call)

        async def run() -> list[GenerateEvent]:
            async with aclosing(second.frontend.resume(found)) as events:
                return [event async for event in events]

        task = asyncio.create_task(run())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RouterStream, "cancel", note)
            try:
                await whole.worker.until(lambda: len(adoptions) == lets_pass + 1)
                yield Held(whole, second, task, adoptions[-1], refuse)
                await whole.worker.until(
                    lambda: cancelled == [each.handle for each in adoptions if each not in refused]
                )
                await until_nothing_left(second)
            finally:
                task.cancel()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's own bound ends nothing."""
    monkeypatch.setattr(frontend, "CONFIRM_SECONDS", LONG)


@pytest.mark.usefixtures("patient")
async def test_an_abort_ends_it() -> None:
    async with silent() as held:
        assert held.router.frontend.abort_request("r1", "ana") == 1
        assert isinstance(await held.error(), Cancelled)


@pytest.mark.usefixtures("patient")
async def test_an_abort_ends_the_sequence_that_was_adopted_already_too() -> None:
    async with silent(sequences=2, lets_pass=1) as held:
        held.router.frontend.abort_request("r1", "ana")
        assert isinstance(await held.error(), Cancelled)


@pytest.mark.usefixtures("patient")
async def test_an_abort_together_with_the_workers_answer_ends_it() -> None:
    """The answer is not followed by a further adoption, whose sequence nobody would cancel."""
    async with silent(sequences=2) as held:
        (member,) = held.router.pool.members()
        member.client._confirmations.settle(held.adoption.handle)
        held.router.frontend.abort_request("r1", "ana")
        assert isinstance(await held.error(), Cancelled)
        assert member.client._last_handle == held.adoption.handle


@pytest.mark.usefixtures("patient")
async def test_a_revoked_key_ends_it() -> None:
    async with silent() as held:
        held.router.frontend.end_revoked(lambda _: False)
        assert isinstance(await held.error(), Unauthenticated)


@pytest.mark.usefixtures("patient")
async def test_the_end_of_a_drain_ends_it() -> None:
    async with silent() as held:
        assert not await held.router.frontend.drain_requests(0.0)
        error = await held.error()
        assert isinstance(error, Unavailable)
        assert "the router stops" in str(error)


@pytest.mark.usefixtures("patient")
async def test_the_deadline_ends_it() -> None:
    async with silent(seconds=1.0) as held:
        assert isinstance(await held.error(), DeadlineExceeded)


async def test_a_worker_that_says_nothing_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of a version that never answers: the client is told to try again, and nothing runs on for nobody."""
    monkeypatch.setattr(frontend, "CONFIRM_SECONDS", 0.05)
    async with silent() as held:
        error = await held.error()
        assert isinstance(error, Unavailable)
        assert error.retry_after_s > 0
        assert "did not answer" in str(error)


async def test_an_orphan_that_ends_before_its_adoption_is_not_found() -> None:
    """The time of the second sequence is over when the first one has been adopted."""
    async with silent(sequences=2, lets_pass=1) as held:
        held.whole.worker.servicer.orphans.close()
        held.refuse()
        error = await held.error()
        assert isinstance(error, NotFound)
        assert "send the request again" in str(error)
