"""Sequences of a worker that drains with `--drain migrate` go on at another one, or stay where there is no room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from common.contracts.types import FinishReason
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.placement.worker_model import Load
from router.requests.run import Prefix
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker, prompt_of
from tests.support.router.frontend_harness import (
    CLOCK,
    Harness,
    ends_of,
    frontend_over,
    in_background,
    request,
    text_of,
    tokens_of,
    until_nothing_left,
)


async def _add(harness: Harness, worker: FakeWorker) -> None:
    """Start a worker, and wait until the router uses it."""
    connected = len(harness.pool.models())
    await worker.start()
    harness.pool.add_worker(worker.address)
    await harness.connected(connected + 1)


async def test_what_the_draining_worker_sampled_until_its_end_is_kept_and_the_rest_comes_from_another() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=6)) as task:
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 4})
        await _add(harness, other)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        # The steps that were in flight when the cancel came, then the end.
        draining.step({1: [101]})
        draining.step({1: [102]}, finished={1: FinishReason.CANCELLED})
        events = await task
        assert tokens_of(events) == [100, 101, 102, 103, 104, 105]
        assert text_of(events) == "<100><101><102><103><104><105>."
        (submit,) = other.submits
        assert prompt_of(submit) == [*range(1, 11), 100, 101, 102]
        assert (submit.output_tokens_before, submit.sampling.max_tokens) == (3, 6)
        assert ends_of(events)[0].usage.recomputed_tokens == 13
        (move,) = harness.decisions.find(kind="migration")
        assert (move.chosen, [reason.partition(":")[0] for reason in move.reasons]) == ("w1", ["drain"])
        assert len(draining.cancels) == 1
        await until_nothing_left(harness)
        await other.kill()


async def test_a_deadline_does_not_make_the_booked_place_a_dearer_one() -> None:
    """The cheapest has a prompt of 1,000 s before it, the other one steps of 400 s. The client has a token already."""
    draining, cheap, other = FakeWorker("w0"), FakeWorker("w1"), FakeWorker("w2")
    deadline = CLOCK.monotonic() + 950.0
    wanted = request(max_tokens=6, deadline=deadline)
    async with frontend_over(draining) as harness, in_background(harness, wanted) as task:
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 4})
        for worker, step in ((cheap, 0.01), (other, 400.0)):
            await _add(harness, worker)
            model = next(each for each in harness.pool.models() if each.worker_id == worker.worker_id)
            model.placed(0, 10**9 if worker is cheap else 0, 0)
            load = Load(unheld_blocks=64, decode_step_seconds=step, prefill_seconds_per_token=1e-6, steps=9)
            model.heartbeat(load, CLOCK.monotonic())
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        draining.step({}, finished={1: FinishReason.CANCELLED})
        await harness.until(lambda: bool(cheap.submits or other.submits))
        assert (len(cheap.submits), len(other.submits)) == (1, 0)
        task.cancel()
        await cheap.kill()
        await other.kill()


async def test_a_worker_that_finishes_keeps_its_sequences() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1", automatic=True)
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=2)) as task:
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 0})
        await _add(harness, other)
        draining.heartbeat(draining=True)
        await harness.until(lambda: harness.pool.models()[0].load.draining)
        draining.step({1: [101]}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100, 101]
        assert not draining.cancels
        assert not other.submits
        await other.kill()


async def test_without_room_elsewhere_a_sequence_stays_until_there_is_room() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1", max_num_seqs=1)
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=3)) as task:
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 0})
        await _add(harness, other)
        other.heartbeat(running=1)  # of another router
        await harness.until(lambda: harness.pool.models()[1].sequences == 1)
        draining.heartbeat(draining=True, migrating=True)
        await harness.until(lambda: harness.pool.models()[0].load.migrating)
        draining.step({1: [101]})
        await harness.until(lambda: tokens_of(harness.seen) == [100, 101])
        assert not draining.cancels
        other.heartbeat(running=0)
        await draining.until(lambda: bool(draining.cancels))
        draining.step(finished={1: FinishReason.CANCELLED})
        await other.until(lambda: bool(other.submits))
        other.step({1: [102]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100, 101, 102]
        await until_nothing_left(harness)
        await other.kill()


async def test_the_only_worker_keeps_its_sequences() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(max_tokens=1)) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.heartbeat(draining=True, migrating=True)
        await harness.until(lambda: harness.pool.models()[0].load.migrating)
        worker.step({1: [100]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100]
        assert not worker.cancels


async def test_a_sequence_that_ends_by_itself_meanwhile_gives_its_booked_place_back() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=1)) as task:
        await draining.until(lambda: bool(draining.submits))
        await _add(harness, other)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        assert harness.pool.models()[1].outstanding == 1
        draining.step({1: [100]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        assert tokens_of(await task) == [100]
        assert not other.submits
        assert not harness.decisions.find(kind="migration")
        await until_nothing_left(harness)
        await other.kill()


async def test_a_client_that_leaves_meanwhile_gives_the_booked_place_back() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=1)) as task:
        await draining.until(lambda: bool(draining.submits))
        await _add(harness, other)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        task.cancel()
        await harness.until(lambda: not harness.admission.inside)
        assert harness.pool.models()[1].outstanding == 0
        await until_nothing_left(harness)
        await other.kill()


@pytest.mark.parametrize("ends", [True, False], ids=["it ends the sequence", "its stream breaks"])
async def test_a_booked_worker_that_dies_is_replaced_by_any_other(ends: bool) -> None:
    draining, booked, third = FakeWorker("w0"), FakeWorker("w1"), FakeWorker("w2", automatic=True)
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=3)) as task:
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 0})
        await _add(harness, booked)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        await booked.kill()
        await harness.connected(1)
        await _add(harness, third)
        if ends:
            draining.step({1: [101]}, finished={1: FinishReason.CANCELLED})
        else:
            await draining.kill()
        assert tokens_of(await task) == [100, 101, 102]
        assert prompt_of(third.submits[0]) == [*range(1, 11), 100, *([101] if ends else [])]
        await until_nothing_left(harness)
        await third.kill()


async def test_drains_are_no_losses_however_many_there_are() -> None:
    """A request fails after its fourth lost worker; a rolling restart of many workers costs it nothing."""
    workers, rounds = [FakeWorker("w0"), FakeWorker("w1")], 6
    async with (
        frontend_over(*workers) as harness,
        in_background(harness, request(max_tokens=rounds + 1)) as task,
    ):
        await harness.until(lambda: any(each.submits for each in workers))
        if not workers[0].submits:
            workers.reverse()
        for position in range(rounds):
            here, there = workers[position % 2], workers[1 - position % 2]
            before = len(there.submits)
            handle = here.submits[-1].handle
            there.heartbeat()
            here.step({handle: [100 + position]}, admitted={handle: 0})
            here.heartbeat(draining=True, migrating=True)
            await here.until(lambda here=here, handle=handle: [c.handle for c in here.cancels][-1:] == [handle])  # type: ignore[misc]
            here.step(finished={handle: FinishReason.CANCELLED})
            await there.until(lambda there=there, before=before: len(there.submits) > before)  # type: ignore[misc]
        last = workers[rounds % 2]
        handle = last.submits[-1].handle
        last.step({handle: [100 + rounds]}, admitted={handle: 0}, finished={handle: FinishReason.LENGTH})
        assert tokens_of(await task) == [100 + position for position in range(rounds + 1)]
        assert len(harness.decisions.find(kind="migration")) == rounds
        await until_nothing_left(harness)


async def test_each_sequence_of_a_request_moves_by_itself_to_where_there_is_room() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1", max_num_seqs=1)
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=2, n=2)) as task:
        await draining.until(lambda: len(draining.submits) == 2)
        draining.step({1: [100], 2: [100]}, admitted={1: 0, 2: 0})
        await _add(harness, other)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        (moved,) = [cancel.handle for cancel in draining.cancels]
        stays = 3 - moved
        draining.step({stays: [101]}, finished={stays: FinishReason.LENGTH, moved: FinishReason.CANCELLED})
        await other.until(lambda: bool(other.submits))
        assert other.submits[0].index == moved - 1
        other.step({1: [101]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        ends = ends_of(await task)
        assert [end.usage.output_tokens for end in ends.values()] == [2, 2]
        await until_nothing_left(harness)
        await other.kill()


Stream = AsyncGenerator[GenerateEvent, None]


async def _unread(harness: Harness, worker: FakeWorker, wanted: ValidatedRequest) -> Stream:
    """Begin a request, and return its stream after the admission; nobody reads on."""
    stream = harness.frontend.generate(wanted)
    first = asyncio.create_task(anext(stream))
    await worker.until(lambda: bool(worker.submits))
    worker.step({1: [100]}, admitted={1: 0})
    await first
    return stream


async def test_a_sequence_whose_end_is_unread_books_no_place() -> None:
    """Another sequence of the draining worker moves in the same pass: so the pass has been."""
    draining, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(draining) as harness:
        stream = await _unread(harness, draining, request(max_tokens=2))
        draining.step({1: [101]}, finished={1: FinishReason.LENGTH})
        await harness.until(lambda: harness.pool.models()[0].outstanding == 0)
        async with in_background(harness, request(max_tokens=2)):
            await draining.until(lambda: len(draining.submits) == 2)
            await _add(harness, other)
            draining.heartbeat(draining=True, migrating=True)
            await draining.until(lambda: bool(draining.cancels))
            assert [cancel.handle for cancel in draining.cancels] == [2]
            assert harness.pool.models()[1].outstanding == 1
        await stream.aclose()
        await other.kill()


async def test_an_end_that_is_unread_gives_the_booked_place_back() -> None:
    draining, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(draining) as harness:
        stream = await _unread(harness, draining, request(max_tokens=2))
        await _add(harness, other)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        assert harness.pool.models()[1].outstanding == 1
        draining.step({1: [101]}, finished={1: FinishReason.LENGTH})
        await harness.until(lambda: harness.pool.models()[1].outstanding == 0)
        await stream.aclose()
        await other.kill()


async def test_a_worker_that_dies_while_its_sequence_is_to_move_is_a_loss() -> None:
    """The booked place is free at once, although the client reads nothing."""
    draining, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(draining) as harness:
        stream = await _unread(harness, draining, request(max_tokens=2))
        (run,) = harness.frontend._runs
        await _add(harness, other)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        await draining.kill()
        await harness.until(lambda: len(harness.pool.models()) == 1 and harness.pool.models()[0].outstanding == 0)
        rest = asyncio.create_task(_rest_of(stream))
        await other.until(lambda: bool(other.submits))
        assert (run.sequences[0].attempt, run.sequences[0].drained) == (2, 0)
        (move,) = harness.decisions.find(kind="migration")
        assert not move.reasons[0].startswith("drain")
        other.step({1: [101]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        await rest
        await until_nothing_left(harness)
        await other.kill()


async def _rest_of(stream: Stream) -> list[GenerateEvent]:
    return [event async for event in stream]


async def test_a_full_worker_with_the_prefix_does_not_hide_an_idle_one() -> None:
    names = "w0", "w1", "w2"
    draining, full, idle = (FakeWorker(name, num_blocks=10_000, max_model_len=20_000) for name in names)
    async with frontend_over(draining) as harness, in_background(harness, request(prompt=8000, max_tokens=6)):
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 0})
        await _add(harness, full)
        await _add(harness, idle)
        (run,) = harness.frontend._runs
        assert run.identity is not None
        rates = {"decode_step_seconds": 0.01, "prefill_seconds_per_token": 1e-4, "steps": 1}
        full.heartbeat(running=8, **rates)
        await harness.until(lambda: harness.pool.models()[1].sequences == 8)
        # As after another request with this prompt.
        prefix = Prefix.of(run.request, run.identity, [])
        harness.dispatcher._memory.remember("w1", prefix.block_hashes, CLOCK.monotonic() + PATIENCE_S)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        assert [run.sequences[0].booked and run.sequences[0].booked.worker_id] == ["w2"]
        await full.kill()
        await idle.kill()


@pytest.mark.parametrize("why", ["it drains too", "it is another process"])
async def test_a_booked_worker_that_may_not_take_it_is_replaced(why: str) -> None:
    draining, booked, third = FakeWorker("w0"), FakeWorker("w1"), FakeWorker("w2", automatic=True)
    async with frontend_over(draining) as harness, in_background(harness, request(max_tokens=2)) as task:
        await draining.until(lambda: bool(draining.submits))
        draining.step({1: [100]}, admitted={1: 0})
        await _add(harness, booked)
        draining.heartbeat(draining=True, migrating=True)
        await draining.until(lambda: bool(draining.cancels))
        await _add(harness, third)
        before = harness.pool.models()[1]
        if why == "it drains too":
            booked.heartbeat(draining=True)
            await harness.until(lambda: before.load.draining)
        else:
            await booked.restart()
            await harness.until(lambda: len(harness.pool.models()) == 3 and before not in harness.pool.models())
            # The new process is full, and the router knows no place in its batch.
            booked.heartbeat(running=100)
            await harness.until(lambda: any(each.load.running == 100 for each in harness.pool.models()))
        draining.step(finished={1: FinishReason.CANCELLED})
        assert tokens_of(await task) == [100, 101]
        assert not booked.submits
        await until_nothing_left(harness)
        await booked.kill()
        await third.kill()
