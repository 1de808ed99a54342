"""Deadlines of requests that have to wait for a worker: hopeless at arrival, hopeless later, and kept ones."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from common.contracts.errors import DeadlineExceeded, QueueExpired
from common.contracts.types import DecisionKind
from router.observe.diagnosis.causes import Cause
from router.observe.diagnosis.rules import diagnose
from router.placement.admission import ANY_WORKER
from router.placement.fair_queue import ONE_FLOW, FairQueue, Flow, Ticket
from router.placement.first_tokens import TRIED_EVERY_S, FirstTokens
from router.placement.worker_model import Load, WorkerModel, WorkerState
from router.requests.dispatcher import Job, LoadReservation
from router.requests.explainer import Foreseen
from tests.router.requests.test_explainer import explainer_of
from tests.router.requests.test_outcomes import history, outcome
from tests.router.requests.test_placements import full, job
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import (
    CLOCK,
    Harness,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)
from tests.support.turns import until_blocked

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


def stayed(harness: Harness, seconds: float, ago: float = 0.0) -> WorkerModel:
    """Let the only worker show how long a sequence stayed there, so many seconds ago."""
    (model,) = harness.pool.models()
    model.rates.finished(seconds, 3, CLOCK.monotonic() - ago)
    return model


async def waits(harness: Harness, wanted: Job, reservation: LoadReservation) -> None:
    """Demand that a job is not refused at its arrival: it gets the slot that is then released."""
    before = len(harness.decisions.find(kind=DecisionKind.QUEUED))
    waiting = asyncio.create_task(harness.dispatcher.place_job(wanted, harness.dispatcher.ticket(wanted.priority)))
    await harness.until(lambda: waiting.done() or len(harness.decisions.find(kind=DecisionKind.QUEUED)) > before)
    reservation.release()
    await waiting


async def test_a_request_that_must_wait_too_long_is_refused_at_arrival_with_the_prediction() -> None:
    """Two sequences are before it at the only slot, where one has just stayed for 1,000 s."""
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        reservation = await full(harness)
        stayed(harness, 1000.0)
        with pytest.raises(QueueExpired, match=r"s are left, and the first token is predicted in \d{4}"):
            await harness.dispatcher.place_job(due(100.0), harness.dispatcher.ticket(0))
        assert len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 0, "it did not wait"
        await waits(harness, due(1e6), reservation)


async def test_a_stay_that_nobody_measured_lately_refuses_nobody() -> None:
    """What is before it has 3 tokens of 100 s each. Nobody knows that they do not end before."""
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6, step=100.0)
        await waits(harness, due(500.0), await full(harness))
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        stayed(harness, 1000.0, ago=3600.0)
        await waits(harness, due(500.0), await full(harness))


async def test_a_place_behind_a_sequence_whose_stay_is_assumed_refuses_nobody() -> None:
    """The overcommit lets it wait at the worker."""
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6, step=100.0)
        await harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0))
        assert (await explainer_of(harness).explain(request(), 500.0)).outcome is Foreseen.PLACED
        assert len((await harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0))).reservations) == 1
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        await harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0))
        stayed(harness, 10_000.0)
        with pytest.raises(DeadlineExceeded):
            await harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0))


async def test_another_worker_than_the_cheapest_keeps_a_deadline() -> None:
    """The cheapest has 1,000 s of work before the request; the other one is idle, and its steps are slow."""
    async with frontend_over(FakeWorker("w-0", max_num_seqs=1), FakeWorker("w-1", max_num_seqs=1)) as harness:
        cheap, other = harness.pool.models()
        cheap.placed(1, 0, 0)
        cheap.rates.finished(1000.0, 3, CLOCK.monotonic())
        for model, step in ((cheap, 0.01), (other, 400.0)):
            load = Load(unheld_blocks=64, decode_step_seconds=step, prefill_seconds_per_token=1e-6, steps=9)
            model.heartbeat(load, CLOCK.monotonic())
        assert (await harness.dispatcher.foresee_job(job(), ONE_FLOW)).choice.worker is cheap
        assert (await explainer_of(harness).explain(request(), 950.0)).outcome is Foreseen.PLACED
        placement = await harness.dispatcher.place_job(due(950.0), harness.dispatcher.ticket(0))
        assert placement.worker_id == other.worker_id
        assert "too late" in {each.name: each for each in placement.decision.candidates}[cheap.worker_id].rejected


async def test_a_full_worker_that_would_be_in_time_keeps_a_request_from_its_refusal() -> None:
    """The one with a slot has 10,000 s of work. The full one may be in time, so nobody can say that all is lost."""
    async with frontend_over(FakeWorker("w-0", max_num_seqs=1), FakeWorker("w-1", max_num_seqs=1)) as harness:
        free, quick = harness.pool.models()
        quick.placed(4, 0, 0)  # twice its places, and the tenant is entitled to twice as many
        quick.rates.finished(1.0, 3, CLOCK.monotonic())
        load = Load(unheld_blocks=64, decode_step_seconds=0.01, prefill_seconds_per_token=1e-6, steps=9)
        quick.heartbeat(load, CLOCK.monotonic())
        free.heartbeat(replace(load, prefill_seconds_per_token=1000.0), CLOCK.monotonic())
        placement = await harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0))
        assert placement.worker_id == free.worker_id
        quick.rates.finished(1e6, 3, CLOCK.monotonic())
        with pytest.raises(DeadlineExceeded):
            await harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0))


def hang(monkeypatch: pytest.MonkeyPatch, hangs: WorkerModel) -> None:
    real, why = WorkerModel.trouble, (WorkerState.HUNG, "its step runs for 9.0 s; at most 5.0 s expected")
    monkeypatch.setattr(WorkerModel, "trouble", lambda self, now: why if self is hangs else real(self, now))


async def test_while_a_worker_hangs_only_the_work_itself_refuses_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are full, and have just shown stays of 10,000 s. The one that hangs may go on at any moment, and is fast."""
    async with frontend_over(FakeWorker("w-0", max_num_seqs=1), FakeWorker("w-1", max_num_seqs=1)) as harness:
        slow, hangs = harness.pool.models()
        held = await full(harness), await full(harness)
        for model, prefill in ((slow, 100.0), (hangs, 1e-6)):
            model.heartbeat(replace(model.load, prefill_seconds_per_token=prefill, steps=9), CLOCK.monotonic())
            model.rates.finished(10_000.0, 3, CLOCK.monotonic())
        assert {each.model.worker_id for each in held} == {slow.worker_id, hangs.worker_id}
        hang(monkeypatch, hangs)
        waiting = asyncio.create_task(harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0)))
        await harness.until(lambda: waiting.done() or bool(harness.decisions.find(kind=DecisionKind.QUEUED)))
        await until_blocked(waiting)
        assert not waiting.done()
        monkeypatch.undo()
        with pytest.raises(DeadlineExceeded):
            await harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0))
        waiting.cancel()


async def test_while_a_worker_is_away_only_the_work_itself_refuses_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        reservation = await full(harness)
        stayed(harness, 10_000.0)
        monkeypatch.setattr(harness.pool, "absent", lambda: [("w-1", "connecting: refused")])
        waiting = asyncio.create_task(harness.dispatcher.place_job(due(500.0), harness.dispatcher.ticket(0)))
        await harness.until(lambda: waiting.done() or bool(harness.decisions.find(kind=DecisionKind.QUEUED)))
        assert not waiting.done()
        waiting.cancel()
        reservation.release()


async def test_a_bad_rate_of_long_ago_refuses_no_request_at_an_idle_worker() -> None:
    """Nothing would be placed there any more, and so nothing measured."""
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        model = measured(harness, prefill=100.0, running=0)
        with pytest.raises(DeadlineExceeded, match="is predicted in 1000"):
            await harness.dispatcher.place_job(due(10.0), harness.dispatcher.ticket(0))
        assert (await explainer_of(harness).explain(request(), 10.0)).outcome is Foreseen.TOO_LATE
        model.shown_at -= 3600.0
        assert (await explainer_of(harness).explain(request(), 10.0)).outcome is Foreseen.PLACED
        placement = await harness.dispatcher.place_job(due(10.0), harness.dispatcher.ticket(0))
        with pytest.raises(DeadlineExceeded):  # one measures it; more would be late together
            await harness.dispatcher.place_job(due(10.0), harness.dispatcher.ticket(0))
        placement.reservations[0].release()


async def test_a_higher_priority_is_not_refused_for_what_it_may_pass() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        reservation = await full(harness)
        stayed(harness, 1000.0)
        await waits(harness, due(100.0, priority=5), reservation)


async def test_a_tenant_below_its_share_is_not_refused_for_what_one_above_its_own_has_at_a_worker() -> None:
    """Places of others do not count for it, so it has one at once. The KV manager takes blocks from the other one."""
    red, blue = Flow("red"), Flow("blue")
    async with frontend_over(FakeWorker(max_num_seqs=2)) as harness:
        measured(harness, prefill=1e-6, running=0)
        held = [await harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0, red)) for _ in range(3)]
        stayed(harness, 1000.0)
        assert (await harness.dispatcher.foresee_job(due(100.0), blue)).choice.least_s < 100.0
        placement = await harness.dispatcher.place_job(due(100.0), harness.dispatcher.ticket(0, blue))
        held[0].reservations[0].release()
        with pytest.raises(DeadlineExceeded):  # what is there is its own, or within the share of the other one
            await harness.dispatcher.place_job(due(100.0), harness.dispatcher.ticket(0, red))
        with pytest.raises(DeadlineExceeded):
            await harness.dispatcher.place_job(due(100.0), harness.dispatcher.ticket(0, blue))
        for each in (*held, placement):
            each.reservations[0].release()


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
        with pytest.raises(QueueExpired, match=r"predicted in 2000\.000 s even at a worker that is free"):
            await harness.events(request(request_id="r1", deadline=CLOCK.monotonic() + FAR))
        assert len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 1
        assert outcome(harness).ended == "DEADLINE_EXCEEDED"
        found = diagnose(history(harness)).verdict
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
        waiting = asyncio.create_task(harness.dispatcher.place_job(due(FAR), harness.dispatcher.ticket(0)))
        await harness.until(lambda: len(looks) == 3)
        reservation.release()
        assert len((await waiting).reservations) == 1


async def test_an_explanation_says_that_a_wait_would_be_too_long() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        reservation = await full(harness)
        stayed(harness, 1000.0)
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
        await until_nothing_left(harness)


# ------------------------------------------------------------ predictions that are too high


def long_ago(learnt: FirstTokens) -> None:
    """Let what was refused and measured have been so long ago that one is tried."""
    for size in learnt._latest:
        learnt._latest[size] -= TRIED_EVERY_S


async def test_a_refusal_says_how_sure_it_is_and_so_does_its_record() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        measured(harness, prefill=100.0, running=0)
        with pytest.raises(DeadlineExceeded, match=r"predicted in 1000\.\d* s \(no such prediction was measured\)"):
            await harness.events(request(request_id="r1", deadline=CLOCK.monotonic() + 10.0))
        assert "no such prediction was measured" in outcome(harness).failure
        found = diagnose(history(harness)).verdict
        assert (found.cause, "no such prediction was measured" in found.sentence) == (Cause.HOPELESS_DEADLINE, True)


async def test_a_prediction_that_was_several_times_too_high_refuses_nobody_afterwards() -> None:
    """The ten tokens of a prompt are predicted to take 40 s. They take milliseconds."""
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        measured(harness, prefill=4.0, running=0)
        with pytest.raises(DeadlineExceeded):
            await harness.events(request(no_cache=True, deadline=CLOCK.monotonic() + 20.0))
        await harness.events(request(no_cache=True))
        measured(harness, prefill=4.0, running=0)
        assert (await explainer_of(harness).explain(request(no_cache=True), 20.0)).outcome is Foreseen.PLACED
        assert tokens_of(await harness.events(request(no_cache=True, deadline=CLOCK.monotonic() + 20.0))) == [
            100,
            101,
            102,
        ]
        measured(harness, prefill=4.0, running=0)
        late = await explainer_of(harness).explain(request(no_cache=True), 2.0)
        assert late.outcome is Foreseen.TOO_LATE, "2.5 s: no prediction is lowered further"
        assert re.search("the last 2 such predictions were .*times what happened", late.reason)
        assert "it was 40." in late.reason


async def test_where_all_are_refused_one_is_tried_after_a_while() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        learnt = harness.dispatcher.first_tokens
        measured(harness, prefill=4.0, running=0)
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await harness.events(request(no_cache=True, deadline=CLOCK.monotonic() + 20.0))
        long_ago(learnt)
        assert tokens_of(await harness.events(request(no_cache=True, deadline=CLOCK.monotonic() + 20.0))) == [
            100,
            101,
            102,
        ]
        assert len(learnt.about(40.0).measured) == 1


async def test_a_request_that_waits_is_tried_too_and_what_it_waited_in_vain_counts() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        measured(harness, prefill=1e-6)
        reservation = await full(harness)
        stayed(harness, 1.0)
        learnt, allowed = harness.dispatcher.first_tokens, 0.3
        with pytest.raises(DeadlineExceeded, match="is predicted in"):
            await harness.dispatcher.place_job(due(allowed), harness.dispatcher.ticket(0))
        long_ago(learnt)
        with pytest.raises(DeadlineExceeded, match="while the request waited"):
            await harness.dispatcher.place_job(due(allowed), harness.dispatcher.ticket(0))
        (in_vain,) = learnt.about(1.0).measured
        assert (in_vain.came, in_vain.actual_s >= 0.95 * allowed) == (False, True)
        reservation.release()


async def test_a_request_that_is_refused_at_its_turn_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served, real = list[Ticket](), FairQueue.serve_ticket

    def serve(self: FairQueue[object], ticket: Ticket) -> None:
        served.append(ticket)
        real(self, ticket)

    monkeypatch.setattr(FairQueue, "serve_ticket", serve)
    async with frontend_over(FakeWorker()) as harness:
        measured(harness, prefill=100.0, running=0)
        ticket = harness.dispatcher.ticket(0, sequences=8)
        with pytest.raises(DeadlineExceeded):
            await harness.dispatcher.place_job(due(10.0), ticket)
        assert (served, ticket.cost) == ([], 8)
        placement = await harness.dispatcher.place_job(job(), ticket)
        assert (served, ticket.cost) == ([ticket], 0)
        placement.reservations[0].release()
