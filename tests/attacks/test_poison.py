"""Requests that break what they touch: they are refused after the second time, and everybody else goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from common.contracts.errors import EngineFailure, ProtocolViolation
from common.contracts.types import FinishReason
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.contracts.events import GenerateEvent
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Choice, Router
from router.placement.worker_model import WorkerModel
from router.requests.inbox import Inbox
from tests.support.router.fake_worker import FakeWorker, prompt_of
from tests.support.router.frontend_harness import (
    Harness,
    ends_of,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)

POISON, LONG = 13, 30
INNOCENTS = 12


@dataclass
class BrittleWorker(FakeWorker):
    """Its stream breaks at a submission whose prompt has the length POISON, after so many tokens of it.

    Others get a token and are held; from their run number `further` on they get two.
    """

    after: int = 0
    further: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.automatic, self.max_num_seqs, self.num_blocks = True, 64, 1024
        self.held: list[int] = []
        self.poisoned = 0
        self.runs = Counter[str]()

    def run(self, submit: pb.Submit) -> None:
        self.runs[submit.request_id] += 1
        if len(prompt_of(submit)) - submit.output_tokens_before == POISON:
            self.poisoned += 1
            self.sample(submit, self.after)
            self.break_stream()
        else:
            self.held.append(submit.handle)
            self.sample(submit, 2 if self.runs[submit.request_id] >= self.further else 1)

    def sample(self, submit: pb.Submit, count: int) -> None:
        first = 100 + submit.output_tokens_before
        if count:
            self.step({submit.handle: range(first, first + count)}, admitted={submit.handle: 0})

    def break_stream(self) -> None:
        self.held.clear()
        self.fail(ProtocolViolation("the stream broke"))

    def end_all(self) -> None:
        self.step({handle: [7] for handle in self.held}, finished=dict.fromkeys(self.held, FinishReason.LENGTH))


@asynccontextmanager
async def innocents(harness: Harness) -> AsyncIterator[list[asyncio.Task[list[GenerateEvent]]]]:
    async with AsyncExitStack() as stack:
        # Long enough that no prompt grows to the poison's length.
        wanted = [request(prompt=20, max_tokens=20) for _ in range(INNOCENTS)]
        yield [await stack.enter_async_context(in_background(harness, each)) for each in wanted]


async def until_each_has_a_token(harness: Harness) -> None:
    """Wait at the router: what a worker has sent before its stream breaks may be lost with it."""
    await harness.until(lambda: sum(bool(tokens_of(seen)) for seen in harness.seen_of_all) == INNOCENTS)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_request_that_breaks_its_worker_twice_is_refused_and_the_others_end_well(count: int) -> None:
    workers = [BrittleWorker(f"w{number}") for number in range(count)]

    def held() -> int:
        return sum(len(worker.held) for worker in workers)

    async with frontend_over(*workers) as harness, innocents(harness) as others:
        await until_each_has_a_token(harness)
        with pytest.raises(EngineFailure) as refused:
            await harness.events(request(prompt=POISON))
        assert sum(worker.poisoned for worker in workers) == 2, str(refused.value)
        assert "2 workers broke with this request" in str(refused.value)
        await harness.until(lambda: held() == INNOCENTS)
        for worker in workers:
            worker.end_all()
        ends = await asyncio.gather(*others)
        assert [ends_of(events)[0].reason for events in ends] == [FinishReason.LENGTH] * INNOCENTS
        await until_nothing_left(harness)


async def test_requests_that_were_only_lost_beside_a_poison_are_not_refused_with_it() -> None:
    """None has a token when the first worker breaks, so all are suspected; they are tried again one after the other."""
    worker, other = FakeWorker("w0", max_num_seqs=64, num_blocks=1024), BrittleWorker("w1")
    async with frontend_over(worker) as harness, innocents(harness) as others:
        async with in_background(harness, request(prompt=POISON)) as poison:
            await worker.until(lambda: len(worker.submits) == INNOCENTS + 1)
            await other.start()
            harness.pool.add_worker(other.address)
            await harness.connected(2)
            await worker.kill()
            with pytest.raises(EngineFailure, match="2 workers broke with this request"):
                await poison
        assert other.poisoned == 1
        await harness.until(lambda: len(other.held) == INNOCENTS)
        other.end_all()
        ends = await asyncio.gather(*others)
        assert [ends_of(events)[0].reason for events in ends] == [FinishReason.LENGTH] * INNOCENTS
        await other.kill()


@pytest.mark.parametrize("tokens", [0, 1, 5])
async def test_a_request_alone_that_breaks_its_workers_at_one_place_is_refused_after_the_second(tokens: int) -> None:
    worker = BrittleWorker("w0", after=tokens)
    async with frontend_over(worker) as harness:
        with pytest.raises(EngineFailure, match="2 workers broke with this request, which got no further"):
            await harness.events(request(prompt=POISON, max_tokens=20))
        assert worker.poisoned == 2
        await until_nothing_left(harness)


@pytest.mark.parametrize(("further", "breaks"), [(2, 2), (3, 3)])
async def test_a_request_that_breaks_its_worker_after_a_token_takes_no_innocent_along(
    further: int, breaks: int
) -> None:
    """Who gets further in the second run is cleared there; else all that were at two breaks are tried apart."""
    worker = BrittleWorker("w0", after=1, further=further)
    async with frontend_over(worker) as harness, innocents(harness) as others:
        await until_each_has_a_token(harness)
        with pytest.raises(EngineFailure, match=f"{breaks} workers broke with this request"):
            await harness.events(request(prompt=POISON, max_tokens=20))
        assert worker.poisoned == breaks
        await harness.until(lambda: len(worker.held) == INNOCENTS)
        worker.end_all()
        ends = await asyncio.gather(*others)
        assert [ends_of(events)[0].reason for events in ends] == [FinishReason.LENGTH] * INNOCENTS
        await until_nothing_left(harness)


class SteppingWorker(BrittleWorker):
    """A prompt of the length LONG takes several steps: it has no token when the poison, once armed, breaks all."""

    armed = False

    def run(self, submit: pb.Submit) -> None:
        if len(prompt_of(submit)) - submit.output_tokens_before == POISON and not self.armed:
            self.held.append(submit.handle)
            self.sample(submit, self.after)
        elif len(prompt_of(submit)) == LONG and self.held:
            self.step(admitted={submit.handle: 0})
        else:
            super().run(submit)


async def test_a_request_without_a_token_beside_a_poison_that_has_one_is_not_refused_for_it() -> None:
    worker = SteppingWorker("w0", after=1)
    first = request(prompt=POISON, max_tokens=20)
    async with frontend_over(worker) as harness, in_background(harness, first) as poison:
        await worker.until(lambda: len(worker.submits) == 1)
        async with in_background(harness, request(prompt=LONG)) as new:
            await worker.until(lambda: len(worker.submits) == 2)
            worker.armed = True
            worker.break_stream()
            with pytest.raises(EngineFailure, match="2 workers broke with this request"):
                await poison
            await harness.until(lambda: len(worker.held) == 1)
            worker.end_all()
            assert ends_of(await new)[0].reason is FinishReason.LENGTH


async def test_a_failure_in_the_placing_of_one_request_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with an error at once, and requests in the queue behind it are placed."""
    route = Router.route

    def faulty(self: Router, placement: PlacementRequest, workers: Collection[WorkerModel], *rest: Any) -> Choice:
        if placement.request_id == "bug":
            raise ZeroDivisionError("a bug")
        return route(self, placement, list(workers), *rest)

    monkeypatch.setattr(Router, "route", faulty)
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)) as first:
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request()) as second:
            await harness.until(lambda: harness.admission.queued == 1)
            # It goes before the request that waits, and fails when the first one makes place.
            async with in_background(harness, request(request_id="bug", priority=1)) as buggy:
                with pytest.raises(ZeroDivisionError):
                    await buggy
            worker.automatic = True
            for handle in (1, 2):
                worker.step({handle: [1]}, admitted={handle: 0}, finished={handle: FinishReason.LENGTH})
            await asyncio.gather(first, second)
        assert await harness.frontend.drain_requests(60.0)
        await until_nothing_left(harness)


async def test_a_failure_in_the_sink_of_one_sequence_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    put, faulty = Inbox.put_event, [0]

    def fails(self: Inbox, index: int, attempt: int, event: Any) -> None:
        if index == 1 and not faulty[0]:
            faulty[0] += 1
            raise ZeroDivisionError("a bug")
        put(self, index, attempt, event)

    monkeypatch.setattr(Inbox, "put_event", fails)
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        events = await harness.events(request(n=3))
        assert [ends_of(events)[index].reason for index in range(3)] == [FinishReason.LENGTH] * 3
        assert worker.streams == 1
        await until_nothing_left(harness)
