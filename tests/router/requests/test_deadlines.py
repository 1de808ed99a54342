"""Deadlines of requests that have to wait for a worker: hopeless at arrival, hopeless later, and kept ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import DeadlineExceeded
from common.types import DecisionKind
from router.core.admission import ANY_WORKER
from router.core.diagnosis.causes import Cause
from router.core.diagnosis.rules import diagnose
from router.core.worker_model import Load, WorkerModel
from router.requests.explainer import Foreseen
from router.requests.jobs import Job
from tests.router.requests.test_explainer import explainer_of
from tests.router.requests.test_outcomes import outcome, story
from tests.router.requests.test_placements import full, job
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import CLOCK, Harness, frontend_over, in_background, nothing_left, request

# A long way off on any machine.
FAR = 1000.0


def due(seconds: float, priority: int = 0) -> Job:
    return replace(job(), deadline=CLOCK.monotonic() + seconds, priority=priority)


def measured(harness: Harness, prefill: float, step: float = 0.0, running: int = 2) -> WorkerModel:
    """Let the only worker show these rates, and so many sequences."""
    (model,) = harness.pool.models()
    load = Load(
        running=running, unheld_blocks=64, decode_step_seconds=step or 0.01, prefill_seconds_per_token=prefill, steps=9
    )
    model.heartbeat(load, CLOCK.monotonic())
    return model


async def test_a_request_that_must_wait_too_long_is_refused_at_arrival_with_the_prediction() -> None:
    """Two sequences of 64 tokens of 10 s each are before it at the only place."""
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6, step=10.0)
        reservation = await full(harness)
        with pytest.raises(DeadlineExceeded, match=r"s are left, and the first token is predicted in \d{3}"):
            await harness.dispatcher.place(due(100.0), harness.dispatcher.ticket(0))
        assert len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 0, "it did not wait"
        waiting = asyncio.create_task(harness.dispatcher.place(due(1e6), harness.dispatcher.ticket(0)))
        await harness.until(lambda: len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 1)
        reservation.release()
        await waiting


async def test_a_higher_priority_is_not_refused_for_what_it_may_pass() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6, step=10.0)
        reservation = await full(harness)
        wanted = due(100.0, priority=5)
        waiting = asyncio.create_task(harness.dispatcher.place(wanted, harness.dispatcher.ticket(5)))
        await harness.until(lambda: len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 1)
        reservation.release()
        assert len((await waiting).reservations) == 1


async def test_a_request_that_becomes_hopeless_in_the_queue_ends_then() -> None:
    """A free worker would take 1,000 s for its ten tokens. It waits for the seconds that it has beyond that."""

    async def attempt(seconds: float) -> None:
        async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
            measured(harness, prefill=100.0)
            await full(harness)
            deadline = CLOCK.monotonic() + 1000.0 + seconds
            with pytest.raises(DeadlineExceeded) as late:
                await harness.events(request(priority=1, deadline=deadline))
            if ANY_WORKER not in str(late.value):
                raise TooSlow
            assert CLOCK.monotonic() < deadline - 900.0, "long before the deadline"

    await with_enough_time(attempt, 0.3)


async def test_the_end_in_the_queue_comes_before_the_deadline_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction passes what is left between two looks, long before the deadline."""
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        await full(harness)
        predictions = iter([1.0, FAR - 0.05, 2 * FAR])  # at arrival; then a look after 0.05 s; then the end
        monkeypatch.setattr(harness.dispatcher, "_soonest", lambda waiting, has_room: next(predictions))
        with pytest.raises(DeadlineExceeded, match=r"predicted in 2000\.000 s even at a worker that is free"):
            await harness.events(request(request_id="r1", deadline=CLOCK.monotonic() + FAR))
        assert len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 1
        assert outcome(harness).ended == "DEADLINE_EXCEEDED"
        found = diagnose(story(harness)).verdict
        assert found.cause is Cause.HOPELESS_DEADLINE
        assert found.sentence.startswith("It waited for a worker until its deadline was hopeless, after ")
        assert "predicted in 2000.000 s" in found.sentence


async def test_a_prediction_that_improves_keeps_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        reservation = await full(harness)
        predictions, looks = iter([1.0, FAR - 0.05]), list[float]()

        def soonest(waiting: object, has_room: bool) -> float:
            looks.append(next(predictions, 0.0))
            return looks[-1]

        monkeypatch.setattr(harness.dispatcher, "_soonest", soonest)
        waiting = asyncio.create_task(harness.dispatcher.place(due(FAR), harness.dispatcher.ticket(0)))
        await harness.until(lambda: len(looks) == 3)
        reservation.release()
        assert len((await waiting).reservations) == 1


async def test_an_explanation_says_that_a_wait_would_be_too_long() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6, step=10.0)
        reservation = await full(harness)
        explain = explainer_of(harness).explain
        late = await explain(request(), 100.0)
        assert late.outcome is Foreseen.TOO_LATE
        assert "the first token is predicted in" in late.reason
        assert (await explain(request(), 1e6)).outcome is Foreseen.QUEUED
        assert (await explain(request())).outcome is Foreseen.QUEUED
        reservation.release()


async def test_nothing_is_left_of_a_request_that_was_refused() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=10.0)
        async with in_background(harness, request(n=2)):
            await harness.until(lambda: harness.admission.running == 1)
            with pytest.raises(DeadlineExceeded):
                await harness.events(request(deadline=CLOCK.monotonic() + 5.0))
            assert harness.admission.queued == 0
        await harness.until(lambda: nothing_left(harness))
