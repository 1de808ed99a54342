"""A broken connection makes no request suspected while its worker lives, and does where the worker has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from common.contracts.errors import Cancelled, DeadlineExceeded, Draining, EngineFailure, Unauthenticated
from common.contracts.types import FinishReason
from router.contracts.events import GenerateEvent
from router.requests import probation
from router.workers.suspicion import Breakdown
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.frontend_harness import (
    Harness,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)
from tests.support.severed import Severed

LONG = 3600.0  # a verdict that no test waits for


@dataclass
class Distant:
    """A worker behind a proxy, by which its router reaches it."""

    worker: FakeWorker
    proxy: Severed = field(init=False)

    async def start(self) -> None:
        await self.worker.start()
        self.proxy = Severed(self.worker.port)
        await self.proxy.start()

    @property
    def address(self) -> str:
        return self.proxy.address

    async def kill(self) -> None:
        await self.proxy.kill()
        await self.worker.kill()

    async def end(self) -> None:
        """End the worker's process: nothing listens any more."""
        await self.kill()

    async def replace(self) -> None:
        """Let another process answer at the address."""
        self.proxy.accepts.clear()
        self.proxy.sever()
        await self.worker.restart()
        self.proxy.accepts.set()


@dataclass
class Pair:
    """Two workers, and a router that reaches them through proxies."""

    harness: Harness
    workers: tuple[Distant, Distant]
    _seen: list[int] = field(default_factory=lambda: [0, 0])

    def _counts(self) -> list[int]:
        return [len(each.worker.submits) for each in self.workers]

    async def submitted(self) -> Distant:
        """Wait for the next submission; return the worker that got it."""
        await self.harness.until(lambda: self._counts() != self._seen)
        before, self._seen = self._seen, self._counts()
        (found,) = [number for number in range(2) if self._seen[number] > before[number]]
        return self.workers[found]


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    workers = Distant(FakeWorker("w0")), Distant(FakeWorker("w1"))
    async with AsyncExitStack() as stack:
        harness = await stack.enter_async_context(frontend_over(*workers))
        await harness.connected(2)
        yield Pair(harness, workers)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow makes no verdict of itself."""
    monkeypatch.setattr(probation, "VERDICT_SECONDS", PATIENCE_S)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_two_breaks_of_connections_whose_workers_live_accuse_nobody(tokens: int) -> None:
    async with pair() as whole, in_background(whole.harness, request(max_tokens=4)) as task:
        for number in range(2):
            holder = await whole.submitted()
            if tokens:
                handle = holder.worker.submits[-1].handle
                holder.worker.step({handle: [100 + number]}, admitted={handle: 0})
                await whole.harness.until(lambda number=number: len(tokens_of(whole.harness.seen)) > number)  # type: ignore[misc]
            holder.proxy.sever()
        last = await whole.submitted()
        handle = last.worker.submits[-1].handle
        rest = [100 + 2 * tokens + number for number in range(4 - 2 * tokens)]
        last.worker.step({handle: rest}, admitted={handle: 0}, finished={handle: FinishReason.LENGTH})
        assert tokens_of(await task) == [100, 101, 102, 103]
        await until_nothing_left(whole.harness)


async def test_the_first_worker_may_show_that_it_lives_after_the_second_break() -> None:
    async with pair() as whole, in_background(whole.harness, request(max_tokens=1)) as task:
        first = await whole.submitted()
        first.proxy.accepts.clear()
        first.proxy.sever()
        second = await whole.submitted()
        await second.end()
        await whole.harness.connected(0)
        first.proxy.accepts.set()
        last = await whole.submitted()
        assert last is first
        handle = last.worker.submits[-1].handle
        last.worker.step({handle: [100]}, admitted={handle: 0}, finished={handle: FinishReason.LENGTH})
        assert tokens_of(await task) == [100]


@pytest.mark.parametrize("how", ["nothing listens", "another process answers"])
async def test_a_request_whose_workers_end_twice_is_refused(how: str) -> None:
    async with pair() as whole, in_background(whole.harness, request(max_tokens=1)) as task:
        for _ in range(2):
            holder = await whole.submitted()
            await (holder.end() if how == "nothing listens" else holder.replace())
        with pytest.raises(EngineFailure, match="2 workers broke with this request"):
            await task
        await until_nothing_left(whole.harness)


Waiting = tuple[Pair, asyncio.Task[list[GenerateEvent]]]


@pytest.fixture
async def waiting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Waiting]:
    """A request that waits for the verdict: both of its breaks are unsettled, and stay so."""
    monkeypatch.setattr(probation, "VERDICT_SECONDS", LONG)
    waits, when_settled = asyncio.Event(), Breakdown.when_settled

    def noted(breakdown: Breakdown, listener: Callable[[], None]) -> None:
        when_settled(breakdown, listener)
        waits.set()

    monkeypatch.setattr(Breakdown, "when_settled", noted)
    async with pair() as whole, in_background(whole.harness, request(max_tokens=1, request_id="r1")) as task:
        for _ in range(2):
            holder = await whole.submitted()
            holder.proxy.accepts.clear()
            holder.proxy.sever()
        async with asyncio.timeout(PATIENCE_S):
            await waits.wait()
        yield whole, task
        await until_nothing_left(whole.harness)


async def test_a_request_that_waits_for_a_verdict_may_be_aborted(waiting: Waiting) -> None:
    whole, task = waiting
    assert whole.harness.frontend.abort_request("r1") == 1
    with pytest.raises(Cancelled):
        await task


async def test_a_request_that_waits_for_a_verdict_ends_when_its_key_is_revoked(waiting: Waiting) -> None:
    whole, task = waiting
    whole.harness.frontend.end_revoked(lambda _: False)
    with pytest.raises(Unauthenticated):
        await task


async def test_a_request_that_waits_for_a_verdict_ends_when_the_router_stops(waiting: Waiting) -> None:
    whole, task = waiting
    assert not await whole.harness.frontend.drain_requests(0.0)
    with pytest.raises(Draining, match="the router stops"):
        await task
    with pytest.raises(Draining, match="another one takes new requests"):
        await whole.harness.events(request())


async def test_a_request_that_waits_for_a_verdict_ends_at_its_deadline(waiting: Waiting) -> None:
    whole, task = waiting
    (run,) = whole.harness.frontend._runs
    run.expire_in(0.0)
    with pytest.raises(DeadlineExceeded):
        await task


async def test_a_worker_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probation, "VERDICT_SECONDS", 0.01)
    async with pair() as whole, in_background(whole.harness, request(max_tokens=1)) as task:
        for _ in range(2):
            holder = await whole.submitted()
            holder.proxy.accepts.clear()
            holder.proxy.sever()
        with pytest.raises(EngineFailure, match="2 workers broke with this request"):
            await task
