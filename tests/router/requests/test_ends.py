"""Requests that are cut short: clients that go away, and deadlines."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from common.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
)
from common.contracts.types import FinishReason
from quire.types.v1 import types_pb2
from router.contracts.events import Admitted, Finished, Tokens
from router.tenants.tenancy import Caller, Tenant
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import (
    CLOCK,
    ends_of,
    frontend_over,
    in_background,
    request,
    text_of,
    tokens_of,
    until_nothing_left,
)


async def test_closing_the_events_cancels_at_the_worker() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        async with in_background(harness, request(n=2)):
            await worker.until(lambda: len(worker.submits) == 2)
        await worker.until(lambda: len(worker.cancels) == 2)
        assert {cancel.reason for cancel in worker.cancels} == {types_pb2.FinishReason.FINISH_REASON_CANCELLED}
        await until_nothing_left(harness)


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request()):
            await harness.until(lambda: harness.admission.queued == 1)
        assert (harness.admission.queued, harness.admission.running) == (0, 1)


async def test_the_deadline_reaches_the_worker_and_ends_the_stream() -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        wanted = request(deadline=CLOCK.monotonic() + seconds)
        async with frontend_over(worker) as harness, in_background(harness, wanted) as task:
            await harness.until(lambda: bool(worker.submits) or task.done())
            if not worker.submits:
                raise TooSlow
            assert 0 < worker.submits[0].timeout_seconds <= seconds
            worker.step({1: [10]}, admitted={1: 0})
            with pytest.raises(DeadlineExceeded) as late:
                await task
            if not tokens_of(harness.seen):
                raise TooSlow
            assert "before every sequence had finished" in str(late.value)
            end = ends_of(harness.seen)[0]
            assert (end.reason, end.usage.output_tokens) == (FinishReason.DEADLINE, 1)
            await worker.until(lambda: bool(worker.cancels))
            assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE
            await until_nothing_left(harness)

    await with_enough_time(attempt, 0.3)


async def test_a_sequence_that_no_worker_takes_again_before_the_deadline_costs_the_others_nothing() -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        wanted = request(n=2, deadline=CLOCK.monotonic() + seconds)
        async with frontend_over(worker) as harness, in_background(harness, wanted) as task:
            await harness.until(lambda: len(worker.submits) == 2 or task.done())
            if task.done():
                raise TooSlow
            worker.heartbeat(running=1000)
            worker.step({1: [100], 2: [100]}, admitted={1: 0, 2: 0}, finished={2: FinishReason.ERROR})
            await harness.until(lambda: harness.admission.queued == 1 or task.done())
            worker.step({1: [101, 102]}, finished={1: FinishReason.LENGTH})
            with pytest.raises(DeadlineExceeded) as late:
                await task
            if tokens_of(harness.seen) != [100, 101, 102]:
                raise TooSlow
            assert "before every sequence had finished" in str(late.value)
            assert [tokens_of(harness.seen, index) for index in (0, 1)] == [[100, 101, 102], [100]]
            ends = ends_of(harness.seen)
            assert (ends[0].reason, ends[1].reason) == (FinishReason.LENGTH, FinishReason.DEADLINE)
            await until_nothing_left(harness)

    await with_enough_time(attempt, 0.5)


async def test_a_deadline_before_any_block_is_an_error() -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        async with frontend_over(worker) as harness:
            with pytest.raises(DeadlineExceeded) as late:
                await harness.events(request(deadline=CLOCK.monotonic() + seconds))
            if "before a worker was found" in str(late.value):
                raise TooSlow
            assert "before the request got blocks" in str(late.value)
            await worker.until(lambda: bool(worker.cancels))

    await with_enough_time(attempt, 0.1)


async def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        worker.heartbeat(prefill_seconds_per_token=1.0, decode_step_seconds=0.01)
        await harness.until(lambda: harness.pool.models()[0].rates.prefill_token.value is not None)
        with pytest.raises(DeadlineExceeded, match=r"predicted in 10\.0"):
            await harness.events(request(prompt=10, deadline=CLOCK.monotonic() + 5.0))
        assert worker.submits == []
        await until_nothing_left(harness)


# Of 600 s on the wire a second may be rounding.
@pytest.mark.parametrize(
    ("since", "left", "reason", "words"),
    [
        (600.0, 0.5, types_pb2.FinishReason.FINISH_REASON_DEADLINE, "deadline exceeded"),
        (1.0, 60.0, types_pb2.FinishReason.FINISH_REASON_CANCELLED, "the client went away"),
        (1.0, None, types_pb2.FinishReason.FINISH_REASON_CANCELLED, "the client went away"),
    ],
)
@pytest.mark.parametrize("admitted", [True, False])
async def test_who_gives_up_at_the_deadline_has_not_gone_away(
    since: float, left: float | None, reason: int, words: str, admitted: bool
) -> None:
    async def attempt(longer: float) -> None:
        worker, now = FakeWorker(), CLOCK.monotonic()
        deadline = None if left is None else now + longer * left
        wanted = replace(request(), arrived=now - longer * since, deadline=deadline)
        async with frontend_over(worker) as harness:
            async with in_background(harness, wanted) as task:
                await harness.until(lambda: bool(worker.submits) or task.done())
                if admitted and worker.submits:
                    worker.step({1: [10]}, admitted={1: 0})
                    await harness.until(lambda: bool(harness.seen) or task.done())
                if task.done():
                    raise TooSlow
            await worker.until(lambda: bool(worker.cancels))
            assert worker.cancels[0].reason == reason
            assert harness.failure("inference") == words
            await until_nothing_left(harness)

    await with_enough_time(attempt, 1.0)


async def test_a_client_that_leaves_after_the_last_token_got_everything() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        async with aclosing(harness.frontend.generate(request())) as events:
            async for event in events:
                if isinstance(event, Finished):
                    break
        assert harness.failure("inference") is None
        assert harness.registry.get_sample_value("quire:request_failure_total", {"reason": "CANCELLED"}) == 0.0


async def test_a_client_that_does_not_read_gets_everything_later_and_holds_no_place_at_the_worker() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness:
        async with aclosing(harness.frontend.generate(request(max_tokens=100))) as events:
            opening = asyncio.create_task(anext(events))
            await worker.until(lambda: bool(worker.submits))
            worker.step(admitted={1: 0})
            assert isinstance(await opening, Admitted)
            for token in range(99):
                worker.step({1: [token]})
            worker.step({1: [99]}, finished={1: FinishReason.LENGTH})
            (model,) = harness.pool.models()
            await harness.until(lambda: model.outstanding == 0)
            assert harness.admission.tokens_in_flight == 110
            rest = [event async for event in events]
            assert tokens_of(rest) == list(range(100))
            # In one message: what gathers for a client is joined.
            assert [event.token_ids for event in rest if isinstance(event, Tokens)] == [tuple(range(100)), ()]
            assert harness.registry.get_sample_value("quire:generation_tokens_total") == 100
        await until_nothing_left(harness)


async def test_a_request_that_is_answered_as_a_whole_gets_the_same_in_fewer_events() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        streamed = await harness.events(request(max_tokens=50))
        whole = await harness.events(request(max_tokens=50, whole=True))
        assert tokens_of(whole) == tokens_of(streamed) == list(range(100, 150))
        assert text_of(whole) == text_of(streamed)
        assert sum(isinstance(event, Tokens) for event in whole) <= 3
        (end,) = ends_of(whole).values()
        assert end.usage.output_tokens == 50
        assert 0 < end.timings.time_to_first_token < end.timings.total_seconds
        await until_nothing_left(harness)


async def test_a_stop_string_ends_a_whole_answer_at_the_worker_too() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(stop=("<11>",), whole=True)) as asked:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [10]}, admitted={1: 0})
        worker.step({1: [11]})
        await worker.until(lambda: bool(worker.cancels))
        assert tokens_of(await asked) == [10, 11]


def caller(tenant: str) -> Caller:
    return Caller(Tenant(tenant), credential=tenant)


async def test_an_abort_ends_the_request_of_its_tenant_at_the_worker_and_no_other() -> None:
    worker = FakeWorker()
    mine, other = request(request_id="r", caller=caller("red")), request(request_id="r", caller=caller("blue"))
    async with frontend_over(worker) as harness, in_background(harness, mine) as first:
        async with in_background(harness, other) as second:
            await worker.until(lambda: len(worker.submits) == 2)
            assert harness.frontend.abort_request("r", "green") == 0
            assert harness.frontend.abort_request("x", "red") == 0
            assert harness.frontend.abort_request("r", "red") == 1
            with pytest.raises(Cancelled, match="aborted by another call"):
                await first
            await worker.until(lambda: len(worker.cancels) == 1)
            assert not second.done()
            assert harness.frontend.abort_request("r") == 1
            with pytest.raises(Cancelled):
                await second
        await until_nothing_left(harness)


async def test_an_abort_ends_a_request_that_waits_for_a_worker() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request(n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request(request_id="waits")) as task:
            await harness.until(lambda: harness.admission.queued == 1)
            assert harness.frontend.abort_request("waits") == 1
            with pytest.raises(Cancelled):
                await task
        assert (harness.admission.queued, harness.admission.running) == (0, 1)
