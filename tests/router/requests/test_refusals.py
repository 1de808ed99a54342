"""Requests that are refused or have to wait, and what clients receive."""

from __future__ import annotations

import pytest

from common.contracts.errors import (
    AlreadyExists,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from common.contracts.types import DecisionKind, FinishReason
from router.placement.admission import AdmissionLimits
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import (
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)


async def test_a_full_queue_refuses_and_the_decision_is_recorded() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with (
        frontend_over(worker, limits=AdmissionLimits(max_queued=1)) as harness,
        in_background(harness, request(n=2)),
    ):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request()):
            await harness.until(lambda: harness.admission.queued == 1)
            with pytest.raises(Overloaded, match=r"router\.queue: 1 requests wait; at most 1"):
                await harness.events(request(request_id="late"))
    (decision,) = harness.decisions.find("late")
    assert (decision.kind, decision.chosen, dict(decision.figures)["queued"]) == (
        DecisionKind.REJECTION,
        "router.queue",
        1.0,
    )


async def test_who_waits_gets_the_place_that_becomes_free() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)) as first:
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request(request_id="low")) as low:
            await harness.until(lambda: harness.admission.queued == 1)
            async with in_background(harness, request(request_id="high", priority=1)):
                await harness.until(lambda: harness.admission.queued == 2)
                worker.step({1: [1]}, admitted={1: 0, 2: 0}, finished={1: FinishReason.LENGTH})
                await worker.until(lambda: len(worker.submits) == 3)
                assert worker.submits[2].request_id == "high"
                assert not low.done()
                assert not first.done()


async def test_an_id_in_use_is_refused() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(request_id="r1")):
        await worker.until(lambda: bool(worker.submits))
        with pytest.raises(AlreadyExists, match="request r1 is running"):
            await harness.events(request(request_id="r1"))


async def test_a_request_larger_than_any_pool_is_refused_with_the_numbers_and_the_next_one_served() -> None:
    async with frontend_over(FakeWorker(num_blocks=4, automatic=True)) as harness:
        with pytest.raises(InvalidRequest, match="5 blocks of 4") as refused:
            await harness.events(request(prompt=10, max_tokens=8))
        assert isinstance(refused.value.violations[0], FieldViolation)
        assert len(await harness.events(request(prompt=10, max_tokens=2))) == 5
        await until_nothing_left(harness)


async def test_what_a_worker_refuses_is_the_clients_error() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request()) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.refuse(1, InvalidRequest(FieldViolation("prompt_token_ids", "too long")))
        with pytest.raises(InvalidRequest, match="too long"):
            await task
        await until_nothing_left(harness)


async def test_a_draining_router_refuses() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        harness.frontend.draining = True
        with pytest.raises(Unavailable, match="draining"):
            await harness.events(request())


async def test_what_a_drain_does_not_wait_for_ends_with_the_reason() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request()) as running:
        await worker.until(lambda: len(worker.submits) == 1)
        async with in_background(harness, request()) as waiting:
            await harness.until(lambda: len(harness.frontend._runs) == 2)
            assert not await harness.frontend.drain_requests(0.05)
            for task in (running, waiting):
                with pytest.raises(Unavailable, match="the router stops"):
                    await task
        await worker.until(lambda: len(worker.cancels) == 1)
        await until_nothing_left(harness)


async def test_without_any_worker_a_request_is_refused_after_some_patience() -> None:
    async with frontend_over(patience=0.05) as harness:
        with pytest.raises(Unavailable, match=r"no worker for 0\.05 s: none is known"):
            await harness.events(request())
        await until_nothing_left(harness)


async def test_a_worker_that_comes_in_time_is_waited_for() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over() as harness, in_background(harness, request()) as task:
        await worker.start()
        harness.pool.add_worker(worker.address)
        assert tokens_of(await task) == [100, 101, 102]
        await worker.kill()
