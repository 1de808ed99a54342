"""Requests of several tenants before one frontend: turns, shares of slots, and keys that are revoked."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from common.contracts.errors import Overloaded, Unauthenticated
from common.contracts.types import FinishReason
from router.tenants.tenancy import Caller, Tenant, TenantLimits
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import frontend_over, in_background, request, until_nothing_left

RED, BLUE = (Caller(Tenant(name), f"key {name}") for name in ("red", "blue"))


async def test_a_revoked_stream_ends_and_its_sequences_are_cancelled_at_the_worker() -> None:
    worker = FakeWorker()
    async with (
        frontend_over(worker) as harness,
        in_background(harness, request(caller=RED, request_id="red")) as red,
        in_background(harness, request(caller=BLUE, request_id="blue")) as blue,
    ):
        await worker.until(lambda: len(worker.submits) == 2)
        harness.frontend.end_revoked(lambda caller: caller is not RED)
        with pytest.raises(Unauthenticated, match="was revoked"):
            await red
        handle = next(each.handle for each in worker.submits if each.request_id == "red")
        await worker.until(lambda: [each.handle for each in worker.cancels] == [handle])
        assert not blue.done()


async def test_a_revoked_stream_that_nobody_reads_is_cancelled_at_the_worker_too() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness:
        stream = harness.frontend.generate(request(caller=RED))
        first = asyncio.ensure_future(anext(stream))
        await worker.until(lambda: len(worker.submits) == 1)
        worker.step({1: [7]}, admitted={1: 0})
        await first
        harness.frontend.end_revoked(lambda caller: False)
        await worker.until(lambda: len(worker.cancels) == 1)
        await harness.until(lambda: not any(model.outstanding for model in harness.pool.models()))
        with pytest.raises(Unauthenticated):
            async for _ in stream:  # what had arrived before
                pass
        await until_nothing_left(harness)


async def test_a_revoked_request_that_waits_for_a_worker_ends_at_once() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, in_background(harness, request(caller=BLUE, n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        async with in_background(harness, request(caller=BLUE)) as waiting:
            await harness.until(lambda: harness.admission.queued == 1)
            harness.frontend.end_revoked(lambda caller: False)
            with pytest.raises(Unauthenticated):
                await waiting


async def test_places_that_become_free_go_to_the_tenant_below_its_share() -> None:
    """Four slots: red alone holds them all, then blue comes, whose share is two of them."""
    worker = FakeWorker(max_num_seqs=2)

    def names() -> list[str]:
        return [each.request_id for each in worker.submits]

    def end(*handles: int) -> None:
        worker.step(admitted=dict.fromkeys(handles, 0), finished=dict.fromkeys(handles, FinishReason.LENGTH))

    async with frontend_over(worker) as harness, AsyncExitStack() as stack:

        async def ask(caller: Caller, name: str) -> None:
            await stack.enter_async_context(in_background(harness, request(caller=caller, request_id=name)))

        for number in range(6):
            await ask(RED, f"red {number}")
        await harness.until(lambda: harness.admission.inside == 6)
        await worker.until(lambda: len(worker.submits) == 4)
        for number in range(3):
            await ask(BLUE, f"blue {number}")
        await worker.until(lambda: len(worker.submits) == 6)
        assert names()[4:] == ["blue 0", "blue 1"]
        end(1, 2, 3)
        await worker.until(lambda: len(worker.submits) == 7)
        end(5)
        await worker.until(lambda: len(worker.submits) == 8)
        assert names()[6:] == ["red 4", "blue 2"]
        assert harness.admission.queued == 1


async def test_places_that_become_free_go_to_the_sessions_of_a_tenant_in_turns() -> None:
    """A session of many parallel requests has filled the worker and waits, then another one asks once."""
    worker = FakeWorker(max_num_seqs=1)
    async with frontend_over(worker) as harness, AsyncExitStack() as stack:

        async def ask(session: str, name: str) -> None:
            wanted = request(caller=RED, request_id=name, session=session)
            await stack.enter_async_context(in_background(harness, wanted))

        for number in range(6):
            await ask("a", f"a{number}")
        await harness.until(lambda: harness.admission.inside == 6)
        await worker.until(lambda: len(worker.submits) == 2)
        await ask("b", "b0")
        await harness.until(lambda: harness.admission.inside == 7)
        for handle in (1, 2, 3):
            placed = len(worker.submits)
            worker.step(admitted={handle: 0}, finished={handle: FinishReason.LENGTH})
            await worker.until(lambda: len(worker.submits) == placed + 1)  # noqa: B023
        assert [each.request_id for each in worker.submits] == ["a0", "a1", "a2", "b0", "a3"]


async def test_a_tenant_below_its_share_gets_a_place_at_a_worker_that_another_fills() -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with (
        frontend_over(worker) as harness,
        in_background(harness, request(caller=RED, n=2)),
    ):
        await worker.until(lambda: len(worker.submits) == 2)
        async with (
            in_background(harness, request(caller=RED, request_id="red")) as more,
            in_background(harness, request(caller=BLUE, request_id="blue")),
        ):
            await worker.until(lambda: len(worker.submits) == 3)
            assert worker.submits[2].request_id == "blue"
            assert harness.admission.queued == 1
            assert not more.done()


async def test_a_tenant_at_its_limit_is_refused_and_the_decision_is_recorded() -> None:
    worker = FakeWorker()
    small = Caller(Tenant("small", limits=TenantLimits(sequences=3)))
    async with frontend_over(worker) as harness, in_background(harness, request(caller=small, n=2)):
        await worker.until(lambda: len(worker.submits) == 2)
        with pytest.raises(Overloaded, match=r"tenant small\.sequences: 2 sequences are open and 2 more wanted"):
            await harness.events(request(caller=small, n=2, request_id="late"))
        (decision,) = harness.decisions.find("late")
        assert decision.chosen == "tenant small.sequences"
