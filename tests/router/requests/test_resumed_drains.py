"""Requests that move from a draining worker: after another router's death, and while their own router dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import cast

from router.contracts.events import GenerateEvent
from router.requests.resumption import _Answers
from router.workers.client import WorkerClient
from router.workers.orphan_queries import FoundOrphans
from router.workers.pool import Member
from router.workers.resuming import Continuation, Orphan
from tests.router.requests.test_resuming import World, resume, resumed, wanted, world
from tests.support.gpuworker.worker_harness import IDENTITY
from tests.support.router.fake_worker import FakeWorker, prompt_of, running
from tests.support.router.frontend_harness import Harness, tokens_of, until_nothing_left


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
            second.pool.add_worker(other.address)
            await second.connected(2)
            whole.worker.servicer.drain(migrate=True)
            models = second.pool.models
            await second.until(lambda: any(each.worker_id == "w1" and each.outstanding for each in models()))
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await until_nothing_left(second)
        await other.kill()


class Moving:
    """A request that leaves the worker of a world for another one, which has read its submission and no more."""

    def __init__(
        self, whole: World, routers: tuple[Harness, Harness], seen: list[GenerateEvent], other: FakeWorker
    ) -> None:
        self.whole, (self.first, self.second), self.seen, self.other = whole, routers, seen, other

    @property
    def tokens(self) -> list[int]:
        return tokens_of(self.seen)

    def places(self) -> int:
        """Return for how many sequences the drain of the first worker waits."""
        return self.whole.worker.servicer.live_sequences


@asynccontextmanager
async def moving() -> AsyncIterator[Moving]:
    other = FakeWorker("w1", identity=IDENTITY, num_blocks=16, max_model_len=64)
    async with running(other), world() as whole:
        first, second = await whole.router(), await whole.router()
        seen = await whole.begun(first, wanted(), 4)
        first.pool.add_worker(other.address)
        await first.connected(2)
        whole.worker.servicer.drain(migrate=True)
        await whole.step_until(first, lambda: bool(other.submits))
        yield Moving(whole, (first, second), seen, other)


async def test_a_router_that_dies_while_a_drained_sequence_moves_loses_nothing() -> None:
    async with moving() as scene:
        assert scene.places() == 1, "the worker would end before the other one has the sequence"
        had, sampled = scene.tokens, prompt_of(scene.other.submits[0])[5:]
        second = scene.second
        third = FakeWorker("w2", identity=IDENTITY, num_blocks=16, max_model_len=64, automatic=True)
        async with running(third):
            second.pool.add_worker(third.address)
            await second.connected(2)
            await scene.whole.dies(scene.first)
            assert scene.places() == 1
            events = await resumed(second, resume(len(had)))
            # The fake worker gives token 100 + n at position n.
            assert had + tokens_of(events) == [*sampled, *range(100 + len(sampled), 112)]
            assert prompt_of(third.submits[0])[5:] == sampled
            await until_nothing_left(second)
            await scene.whole.worker.until(lambda: not scene.places())


async def test_the_first_worker_forgets_a_sequence_once_another_one_has_it() -> None:
    async with moving() as scene:
        assert scene.places() == 1
        handle = scene.other.submits[0].handle
        scene.other.step(admitted={handle: 0})
        await scene.whole.worker.until(lambda: not scene.places())
        await scene.first.pool.aclose()
        assert not scene.whole.worker.servicer.orphans.outcomes


async def test_a_request_that_leaves_meanwhile_is_forgotten() -> None:
    async with moving() as scene:
        assert scene.first.frontend.abort_request("r1") == 1
        await scene.whole.worker.until(lambda: not scene.places())


def test_where_both_workers_have_it_the_one_that_runs_goes_on() -> None:
    ended = Orphan(1, 0, 5, (), 7, Continuation(), ended=True)
    runs = Orphan(2, 0, 5, tuple(range(7)), 0, Continuation())
    further = replace(runs, output_tokens=1)
    member = Member(cast("WorkerClient", None))
    for first, second, best in ((ended, runs, runs), (runs, ended, runs), (ended, further, further)):
        answers = _Answers([(member, FoundOrphans((each,))) for each in (first, second)], silent=False)
        assert answers.sequences()[0].orphan is best
