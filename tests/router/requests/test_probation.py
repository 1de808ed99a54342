"""A suspected request that waits to be tried again can end meanwhile, and goes to no worker that drains by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from common.contracts.errors import Cancelled, DeadlineExceeded, Unauthenticated
from common.contracts.types import FinishReason
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.requests import probation
from router.requests.probation import Probation, Turn
from router.workers.suspicion import Suspicion
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.frontend_harness import (
    Harness,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)

LONG = 3600.0  # a wait that no test sits out


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request "r2" waits behind "r1". Both lost one worker; "r1" goes on at another one, where "r2" has a place."""

    harness: Harness
    first: asyncio.Task[list[GenerateEvent]]
    task: asyncio.Task[list[GenerateEvent]]
    other: FakeWorker

    async def end_first(self) -> None:
        """Let "r1" end, unless it has."""
        if self.first.done():
            return
        submit = self.other.submits[0]
        assert submit.request_id == "r1"
        ends = {submit.handle: FinishReason.LENGTH}
        self.other.step({submit.handle: [100, 101, 102]}, {submit.handle: 0}, ends)
        async with asyncio.timeout(PATIENCE_S):
            assert tokens_of(await self.first) == [100, 101, 102]


@pytest.fixture(params=["its turn", "those that go first"])
async def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Waiting]:
    """The suspected "r2" while it waits. At the end "r1" has ended alone at its worker, and no request is left."""
    for name in ("HOLD_SECONDS", "MAX_WAIT_SECONDS"):
        monkeypatch.setattr(probation, name, LONG)
    suspects, wait = list[Suspicion](), Probation.wait

    async def noted(self: Probation, suspicion: Suspicion, *more: asyncio.Event) -> Turn | None:
        suspects.append(suspicion)
        return await wait(self, suspicion, *more)

    monkeypatch.setattr(Probation, "wait", noted)
    async with AsyncExitStack() as stack:
        dying, other = FakeWorker("w0"), FakeWorker("w1")
        harness = await stack.enter_async_context(frontend_over(dying))
        stack.push_async_callback(other.kill)
        harness.frontend._submitter._probation._seconds = LONG
        tasks = []
        for number in (1, 2):
            wanted = _wanted(f"r{number}")
            tasks.append(await stack.enter_async_context(in_background(harness, wanted)))
            await dying.until(lambda number=number: len(dying.submits) == number)  # type: ignore[misc]
        dying.step({2: [100]} if request.param == "those that go first" else {}, admitted={1: 0, 2: 0})
        await harness.until(lambda: sum(each.admitted for each in harness.frontend._runs) == len(tasks))
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await dying.kill()
        await harness.until(lambda: len(suspects) == len(tasks))
        await other.until(lambda: bool(other.submits))
        waits = Waiting(harness, tasks[0], tasks[1], other)
        yield waits
        await waits.end_first()
        assert [each.request_id for each in other.submits] == ["r1"]
        await until_nothing_left(harness)


def _wanted(request_id: str) -> ValidatedRequest:
    return request(max_tokens=3, request_id=request_id)


async def test_it_may_be_aborted(waiting: Waiting) -> None:
    harness, task = waiting.harness, waiting.task
    assert harness.frontend.abort_request("r2") == 1
    with pytest.raises(Cancelled):
        await task


async def test_it_ends_when_its_key_is_revoked(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, task = waiting.harness, waiting.task
    monkeypatch.setattr(harness.frontend, "_runs", {each for each in harness.frontend._runs if each.request_id == "r2"})
    harness.frontend.end_revoked(lambda _: False)
    with pytest.raises(Unauthenticated):
        await task


async def test_it_ends_at_its_deadline(waiting: Waiting) -> None:
    harness, task = waiting.harness, waiting.task
    (run,) = [each for each in harness.frontend._runs if each.request_id == "r2"]
    run.expire_in(0.0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(DeadlineExceeded):
            await task


async def test_it_goes_to_another_worker_when_its_own_drains_by_then(waiting: Waiting) -> None:
    harness, other, third = waiting.harness, waiting.other, FakeWorker("w2", automatic=True)
    await third.start()
    try:
        harness.pool.add_worker(third.address)
        await harness.connected(2)
        other.heartbeat(draining=True)
        await harness.until(lambda: any(each.load.draining for each in harness.pool.models()))
        await waiting.end_first()
        await harness.until(lambda: len(other.submits) + len(third.submits) == 2)
        assert [each.request_id for each in third.submits] == ["r2"]
        assert tokens_of(await waiting.task) == [100, 101, 102]
        await until_nothing_left(harness)
    finally:
        await third.kill()
