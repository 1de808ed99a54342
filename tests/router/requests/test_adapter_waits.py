"""Requests that wait for an adapter: whose place they hold meanwhile, and where they go then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.contracts.adapters import AdapterRef
from common.contracts.errors import NotFound, NoWorker, Overloaded, QuotaViolation, Unavailable
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import (
    Harness,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)

A, B = AdapterRef("a", 64 * "a"), AdapterRef("b", 64 * "b")
FULL = Overloaded(QuotaViolation("worker.loras", "all 1 adapters in memory are in use, and --max-loras is 1"), 1.0)


@pytest.fixture
def worker() -> FakeWorker:
    """It takes two sequences, and waits for two more."""
    return FakeWorker(max_num_seqs=2)


@pytest_asyncio.fixture
async def harness(worker: FakeWorker) -> AsyncIterator[Harness]:
    async with frontend_over(worker) as harness:
        worker.tell_of_adapters(a=True, b=False)
        await harness.until(lambda: harness.pool.find_adapter("b") == B)
        yield harness


def outstanding(harness: Harness) -> int:
    return sum(model.outstanding for model in harness.pool.models())


async def test_a_request_keeps_its_place_while_its_adapter_is_read(worker: FakeWorker, harness: Harness) -> None:
    async with in_background(harness, request(max_tokens=2, adapter=B)) as waiting:
        await worker.until(lambda: bool(worker.loads))
        assert outstanding(harness) > 0
        assert harness.frontend.adapters() == (set(), {"b"})
        assert not worker.submits
        worker.answer_load()
        await worker.until(lambda: bool(worker.submits))
        worker.run(worker.submits[0])
        assert tokens_of(await waiting) == [100, 101]
    await until_nothing_left(harness)


async def test_requests_whose_adapter_finds_no_room_leave_their_places_to_others(
    worker: FakeWorker, harness: Harness
) -> None:
    """Many more wait than the worker has places for: the base, and the adapter in memory, go on."""
    waiting = [asyncio.create_task(harness.events(request(max_tokens=2, adapter=B))) for _ in range(12)]
    try:
        for count in (1, 2):
            await worker.until(lambda: len(worker.loads) == count)  # noqa: B023 - it ends before the next turn
            worker.answer_load(FULL)
        await harness.until(lambda: outstanding(harness) == 0)
        for adapter in (None, A):
            count = len(worker.submits)
            async with in_background(harness, request(max_tokens=2, adapter=adapter)) as other:
                await worker.until(lambda: len(worker.submits) > count)  # noqa: B023
                worker.run(worker.submits[-1])
                assert tokens_of(await other) == [100, 101]
        assert [each.adapter for each in worker.submits] == ["", "a"]
        await worker.until(lambda: len(worker.loads) == 3)
        worker.automatic = True
        worker.tell_of_adapters(a=False, b=True)
        worker.answer_load()
        assert [tokens_of(each) for each in await asyncio.gather(*waiting)] == [[100, 101]] * 12
    finally:
        for each in waiting:
            each.cancel()
    await until_nothing_left(harness)


async def test_an_adapter_that_was_unloaded_meanwhile_ends_the_wait(worker: FakeWorker, harness: Harness) -> None:
    async with in_background(harness, request(adapter=B)) as waiting:
        await worker.until(lambda: bool(worker.loads))
        worker.answer_load(FULL)
        await worker.until(lambda: len(worker.loads) > 1)
        worker.answer_load(NotFound("adapter 'b' is not known at this worker; load it"))
        with pytest.raises(NotFound, match="adapter 'b'"):
            await waiting
    await until_nothing_left(harness)


# ------------------------------------------------------------ no worker knows the adapter with its content


@pytest.mark.parametrize("returns", [True, False])
async def test_a_stream_whose_adapter_has_gone_waits_beside_the_queue(returns: bool) -> None:
    """Its only worker dies: requests for the base go on at the other one, and the stream when its worker is back."""
    dying, other = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(dying, other, patience=60.0 if returns else 0.2) as harness:
        dying.tell_of_adapters(b=True)
        await harness.until(lambda: harness.pool.find_adapter("b") == B)
        async with in_background(harness, request(max_tokens=3, adapter=B)) as stream:
            await dying.until(lambda: bool(dying.submits))
            dying.step({1: [100]}, admitted={1: 0})
            await harness.until(lambda: tokens_of(harness.seen) == [100])
            assert harness.frontend.adapters() == ({"b"}, set())
            seen = harness.seen
            await dying.kill()
            await harness.connected(1)
            assert tokens_of(await harness.events(request(max_tokens=2))) == [100, 101]
            assert tokens_of(seen) == [100]
            if returns:
                dying.automatic = True
                await dying.restart()
                await harness.connected(2)
                dying.tell_of_adapters(b=True)
                assert tokens_of(await stream) == [100, 101, 102]
            else:
                with pytest.raises(NoWorker, match=r"^no worker for 0\.2 s knows adapter 'b' with the content"):
                    await stream
        await until_nothing_left(harness)
        assert not other.submits[0].adapter


async def test_a_request_whose_adapter_was_replaced_while_it_waited_ends(worker: FakeWorker, harness: Harness) -> None:
    async with in_background(harness, request(adapter=B)) as waiting:
        await worker.until(lambda: bool(worker.loads))
        worker.say(pb.StreamResponse(adapters=pb.Adapters(adapters=[pb.Adapter(name="b", fingerprint=64 * "c")])))
        worker.answer_load(Unavailable("adapter 'b' has another content at this worker than the router knows"))
        with pytest.raises(Unavailable, match="adapter 'b' got another content while the request waited; send"):
            await waiting
    await until_nothing_left(harness)


async def test_a_request_that_waits_beside_the_queue_can_be_aborted(worker: FakeWorker, harness: Harness) -> None:
    async with in_background(harness, request(adapter=B)) as waiting:
        await worker.until(lambda: bool(worker.loads))
        worker.say(pb.StreamResponse(adapters=pb.Adapters()))
        worker.answer_load(Unavailable("the adapter has gone"))
        await harness.until(lambda: bool(harness.dispatcher._aside))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not harness.dispatcher._aside
    await until_nothing_left(harness)
