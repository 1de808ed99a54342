"""Load that a placement reserves at a worker: counted at once, released whatever becomes of the request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from common.contracts.errors import NoWorker, QuireError, Unavailable
from common.contracts.turns import BY_AGE
from common.contracts.types import BlockHash, DecisionKind, KvGroup, KvGroupKind
from router.placement.fair_queue import PASSED_SECONDS
from router.placement.placement_request import PlacementRequest
from router.placement.worker_model import Capacity, Load, WorkerModel
from router.requests.dispatcher import Job, LoadReservation
from router.workers.client import WorkerClient
from tests.support.router.fake_worker import IDENTITY, FakeWorker
from tests.support.router.frontend_harness import (
    CLOCK,
    FixedIndex,
    Harness,
    ends_of,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)
from tests.support.turns import until_blocked, until_idle


def job(sequences: int = 1) -> Job:
    return Job(PlacementRequest("r", prompt_tokens=10, max_len=13, max_tokens=3, sequences=sequences), (), 0, None)


@pytest.mark.parametrize("max_wait", [0.001, 0.0])
async def test_a_low_priority_gets_the_eighth_place_in_a_flood_of_higher_ones(max_wait: float) -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1), max_wait=max_wait) as harness:
        dispatcher, order = harness.dispatcher, list[str]()
        held = [await dispatcher.place_job(job(), dispatcher.ticket(0)) for _ in range(2)]

        async def wait(name: str, priority: int) -> None:
            wanted = job()
            wanted = replace(wanted, request=replace(wanted.request, request_id=name), priority=priority)
            placement = await dispatcher.place_job(wanted, dispatcher.ticket(priority))
            order.append(name)
            placement.reservations[0].release()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait("low", -10))
            await harness.until(lambda: len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 1)
            began = CLOCK.monotonic()
            await harness.until(lambda: CLOCK.monotonic() - began > 0.001)
            for number in range(10):
                tasks.create_task(wait(f"high {number}", 5))
            await harness.until(lambda: len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 11)
            held[0].reservations[0].release()
        high = [f"high {number}" for number in range(10)]
        # Two were served before them.
        assert order == ([*high[:5], "low", *high[5:]] if max_wait else [*high, "low"])
        records = {each.request_id: each.reasons for each in harness.decisions.find(kind=DecisionKind.ROUTING)}
        assert records["low"] == ((BY_AGE,) if max_wait else ())
        held[1].reservations[0].release()


async def test_an_old_job_without_a_worker_keeps_no_other_one_from_its_place() -> None:
    """As an operator's pin of a low priority, which goes to the one worker that has not computed its prompt yet."""
    async with frontend_over(FakeWorker(max_num_seqs=8), max_wait=0.001) as harness:
        dispatcher = harness.dispatcher
        held = [await dispatcher.place_job(job(), dispatcher.ticket(0)) for _ in range(7)]
        (worker,) = {each.worker_id for each in held}
        barred = replace(job(), request=replace(job().request, avoids=frozenset({worker})), priority=-10)
        pin = asyncio.create_task(dispatcher.place_job(barred, dispatcher.ticket(-10)))
        await harness.until(lambda: len(harness.decisions.find(kind=DecisionKind.QUEUED)) == 1)
        began = CLOCK.monotonic()
        await harness.until(lambda: CLOCK.monotonic() - began > 0.001)
        held.append(await dispatcher.place_job(job(), dispatcher.ticket(0)))
        held += [
            await dispatcher.place_job(job(), dispatcher.ticket(0)) for _ in range(8)
        ]  # as many again may wait there
        waits = asyncio.create_task(dispatcher.place_job(job(), dispatcher.ticket(0)))
        await harness.until(lambda: len(harness.decisions.find(kind=DecisionKind.QUEUED)) > 1)
        dispatcher._give_up()  # as after the patience
        with pytest.raises(NoWorker):
            await pin
        assert not waits.done(), "its worker is full, and not away"
        held[0].reservations[0].release()
        held.append(await waits)
        for placement in held[1:]:
            placement.reservations[0].release()


def failing_submit(monkeypatch: pytest.MonkeyPatch, error: Exception, call: int) -> None:
    """Let one call of WorkerClient.submit raise, counted from 1."""
    real, calls = WorkerClient.submit_sequence, [0]

    def submit(self: WorkerClient, *args: Any) -> int:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return real(self, *args)

    monkeypatch.setattr(WorkerClient, "submit_sequence", submit)


@pytest.mark.parametrize("call", [1, 2])
async def test_an_unexpected_error_in_the_submit_ends_the_request_and_releases_its_load(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        failing_submit(monkeypatch, RuntimeError("submit is broken"), call)
        with pytest.raises(RuntimeError, match="submit is broken"):
            await harness.events(request(n=2))
        await until_nothing_left(harness)
        assert harness.failure("inference") == "internal error"
        worker.automatic = True
        assert tokens_of(await harness.events(request())) == [100, 101, 102]
        # The sequence before the error was withdrawn before it was sent.
        assert (len(worker.submits), worker.cancels) == (1, [])
        await until_nothing_left(harness)


@pytest.mark.parametrize("call", [1, 2])
async def test_a_worker_that_is_lost_between_choice_and_submit_costs_no_sequence(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        failing_submit(monkeypatch, Unavailable("the worker has just gone"), call)
        events = await harness.events(request(n=2))
        assert [tokens_of(events, index) for index in (0, 1)] == [[100, 101, 102]] * 2
        assert sorted(ends_of(events)) == [0, 1]
        (move,) = harness.decisions.find(kind=DecisionKind.MIGRATION)
        assert move.reasons == ("the worker has just gone",)
        await until_nothing_left(harness)


async def test_a_placement_is_reserved_before_it_is_returned() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=2)) as harness:
        (model,) = harness.pool.models()
        placement = await harness.dispatcher.place_job(job(sequences=2), harness.dispatcher.ticket(0))
        # Ten tokens in blocks of four, and one of each that the second sequence may have to compute again.
        assert (model.outstanding, model.pending_prefill_tokens, model.unheld_blocks) == (2, 11, 64 - 4)
        for reservation in placement.reservations:
            reservation.release()
        assert (model.outstanding, model.pending_prefill_tokens, model.unheld_blocks) == (0, 0, 64)


@pytest.mark.parametrize(("prefix_caching", "hits"), [(True, 2), (False, 0)])
async def test_a_prefix_counts_where_it_was_sent_if_the_worker_keeps_blocks(prefix_caching: bool, hits: int) -> None:
    """Ten tokens in blocks of four: two full blocks."""
    async with frontend_over(FakeWorker(prefix_caching=prefix_caching)) as harness:
        again = replace(job(), block_hashes=(BlockHash(b"a" * 16), BlockHash(b"b" * 16)))
        found = []
        for _ in range(2):
            placement = await harness.dispatcher.place_job(again, harness.dispatcher.ticket(0))
            found.append(dict(placement.decision.candidates[0].figures)["hit_blocks"])
            for reservation in placement.reservations:
                reservation.release()
        assert found == [0, hits]


_FULL = KvGroup(KvGroupKind.FULL, 0, 1, (0,))


@pytest.mark.parametrize(
    ("shape", "answers", "hits"),
    [
        ({}, True, 9),
        ({"window": 8}, True, 4),
        ({"groups": (_FULL, KvGroup(KvGroupKind.WINDOW, 8, 1, (1,)))}, True, 4),
        ({"groups": (_FULL, KvGroup(KvGroupKind.CHUNK, 12, 1, (1,)))}, True, 5),
        ({"groups": (_FULL, KvGroup(KvGroupKind.WINDOW, 8, 1, (1,)))}, False, 9),
    ],
)
async def test_beside_an_index_the_first_blocks_of_a_window_count_where_they_were_sent(
    shape: dict[str, Any], answers: bool, hits: int
) -> None:
    """Others are shared once they are computed, and then the index has them; without one the router's memory counts."""
    worker = FakeWorker(identity=replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, **shape)))
    async with frontend_over(worker, index=FixedIndex({} if answers else None)) as harness:
        wanted = replace(job().request, prompt_tokens=40, max_len=43)
        again = Job(wanted, [BlockHash(bytes([place]) * 16) for place in range(9)], 0, None)
        for expected in (0, hits):
            placement = await harness.dispatcher.place_job(again, harness.dispatcher.ticket(0))
            assert dict(placement.decision.candidates[0].figures)["hit_blocks"] == expected
            placement.reservations[0].release()


async def full(harness: Harness) -> LoadReservation:
    """Fill the only worker (one slot, so two with the overcommit); return one of its two reservations."""
    placement = await harness.dispatcher.place_job(job(sequences=2), harness.dispatcher.ticket(0))
    return placement.reservations[0]


async def test_releasing_a_reservation_serves_the_queue() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        reservation = await full(harness)
        waiting = asyncio.create_task(harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0)))
        await until_blocked(waiting)
        assert not waiting.done()
        reservation.release()
        assert len((await waiting).reservations) == 1


async def test_news_of_a_worker_that_is_still_full_tries_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        (model,), tries = harness.pool.models(), list[int]()
        reservation = await full(harness)
        model.heartbeat(Load(running=8), model.heartbeat_at)  # sequences of other routers
        waiting = asyncio.create_task(harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0)))
        await until_blocked(waiting)
        monkeypatch.setattr(harness.dispatcher, "_serve_queue", lambda: tries.append(1))
        harness.dispatcher.capacity_changed(model)
        assert tries == []
        harness.dispatcher.capacity_changed()  # a worker joined or left
        assert tries == [1]
        model.heartbeat(Load(running=0), model.heartbeat_at)
        monkeypatch.undo()
        reservation.release()
        assert len((await waiting).reservations) == 1


async def test_news_of_a_worker_that_has_room_places_what_waits() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        (model,) = harness.pool.models()
        model.heartbeat(Load(running=8), model.heartbeat_at)
        waiting = asyncio.create_task(harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0)))
        await until_blocked(waiting)
        model.heartbeat(Load(unheld_blocks=64), model.heartbeat_at)
        harness.dispatcher.capacity_changed(model)
        async with asyncio.timeout(60):
            assert len((await waiting).reservations) == 1


async def test_a_placement_that_comes_together_with_a_cancellation_is_released() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        reservation, (model,) = await full(harness), harness.pool.models()
        waiting = asyncio.create_task(harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0)))
        await until_blocked(waiting)
        reservation.release()
        assert model.outstanding == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert model.outstanding == 1


async def test_a_job_that_leaves_the_head_of_the_queue_lets_the_next_one_pass() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        reservation = await full(harness)
        large = asyncio.create_task(harness.dispatcher.place_job(job(sequences=2), harness.dispatcher.ticket(0)))
        await until_blocked(large)
        small = asyncio.create_task(harness.dispatcher.place_job(job(), harness.dispatcher.ticket(0)))
        await until_blocked(small)
        reservation.release()
        await until_idle()
        assert not small.done()
        large.cancel()
        assert len((await small).reservations) == 1


async def test_of_those_that_wait_the_earliest_deadline_is_placed_first() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        reservation, dispatcher = await full(harness), harness.dispatcher
        patient = asyncio.create_task(dispatcher.place_job(job(), dispatcher.ticket(0)))
        await until_blocked(patient)
        deadline = CLOCK.monotonic() + PASSED_SECONDS / 2
        urgent = asyncio.create_task(dispatcher.place_job(job(), dispatcher.ticket(0, deadline=deadline)))
        await until_blocked(urgent)
        reservation.release()
        assert len((await urgent).reservations) == 1
        assert not patient.done()
        patient.cancel()


def model() -> WorkerModel:
    return WorkerModel("w0", Capacity(64, 4, 8, 256), Load(unheld_blocks=64), heartbeat_at=0.0)


def test_a_reservation_is_released_once() -> None:
    worker, released = model(), list[int]()
    reservation = LoadReservation(worker, 10, 3, CLOCK, lambda: released.append(worker.outstanding))
    reservation.prefilled()
    reservation.prefilled()
    assert (worker.outstanding, worker.pending_prefill_tokens, worker.unheld_blocks) == (1, 0, 61)
    reservation.release()
    reservation.release()
    reservation.prefilled()
    reservation.complete(5)
    assert (worker.outstanding, worker.pending_prefill_tokens, worker.unheld_blocks) == (0, 0, 64)
    assert released == [0]
    assert worker.rates.output_tokens.value is None


def test_a_completed_sequence_enters_the_rates_and_releases_its_load() -> None:
    worker = model()
    LoadReservation(worker, 10, 3, CLOCK, lambda: None).complete(5)
    assert worker.rates.output_tokens.value == 5
    assert worker.rates.sequence.value is not None
    assert (worker.outstanding, worker.pending_prefill_tokens) == (0, 0)


async def test_a_refused_job_reserves_nothing() -> None:
    async with frontend_over(FakeWorker()) as harness:
        (model,) = harness.pool.models()
        large = Job(PlacementRequest("r", prompt_tokens=10, max_len=1000, max_tokens=990), (), 0, None)
        with pytest.raises(QuireError, match="fit no worker"):
            await harness.dispatcher.place_job(large, harness.dispatcher.ticket(0))
        assert model.outstanding == 0


async def test_requests_that_wait_get_the_places_of_those_that_end() -> None:
    worker = FakeWorker(max_num_seqs=1, automatic=True)
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)) as first:
        async with in_background(harness, request(n=2)) as second:
            assert len(ends_of(await first)) == len(ends_of(await second)) == 2
        await until_nothing_left(harness)
