"""The share of the event loop: one step at a time, pauses by the time that steps took, and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import coroutine

import pytest

from common.contracts.clock import ManualClock
from common.process.loop_turns import A_STEP, in_steps
from router.api.page.answers import IDLE, MOST_PAUSE_S, LoopShare
from tests.support.turns import counted_turns, take_turn
from tests.support.waiting import until


class Paused:
    """A clock that moves by steps and pauses alone."""

    def __init__(self) -> None:
        self.clock, self.pauses = ManualClock(100.0), list[float]()
        self.share = LoopShare(self.clock, self.pause)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)
        await take_turn()

    async def work(self, *steps: float) -> float:
        for each in steps:
            self.clock.advance(each)
            await take_turn()
        return sum(steps)


async def test_each_step_is_followed_by_a_multiple_of_its_time() -> None:
    paused = Paused()
    assert await paused.share.run(paused.work(0.002, 0.005)) == 0.007
    await paused.share.run(paused.work(0.001))
    assert paused.pauses == pytest.approx([0.0, IDLE * 0.002, IDLE * 0.005, 0.0, IDLE * 0.001])


async def test_a_long_stop_of_the_process_costs_a_bounded_pause() -> None:
    paused = Paused()
    await paused.share.run(paused.work(60.0))
    assert paused.pauses == pytest.approx([0.0, MOST_PAUSE_S])


async def test_no_two_steps_are_in_one_turn_of_the_loop() -> None:
    paused, seen = Paused(), list[int]()
    async with counted_turns() as turns:

        async def work() -> None:
            for _ in range(3):
                seen.append(turns.count)
                await take_turn()

        await asyncio.gather(*(paused.share.run(work()) for _ in range(5)))
    assert len(seen) == len(set(seen)) == 15


async def test_work_that_waits_leaves_the_loop_to_other_work() -> None:
    paused, held = Paused(), asyncio.Event()
    waiting = asyncio.ensure_future(paused.share.run(held.wait()))
    assert await paused.share.run(paused.work(0.001, 0.001)) == 0.002
    assert not waiting.done()
    held.set()
    assert await waiting


async def test_work_is_cancelled_and_may_end_in_its_own_way() -> None:
    paused, ended, began = Paused(), list[str](), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await take_turn()
            ended.append("closed")

    task = asyncio.ensure_future(paused.share.run(work()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["closed"]
    assert await paused.share.run(paused.work(0.5)) == 0.5


async def test_work_that_is_cancelled_before_its_first_step_leaves_nothing() -> None:
    paused = Paused()
    task = asyncio.ensure_future(paused.share.run(paused.work(0.5)))
    await until(lambda: paused.pauses, every=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await paused.share.run(paused.work(0.5)) == 0.5
    assert paused.pauses == [0.0, 0.0, 0.0, MOST_PAUSE_S], "half a second was worked once"


async def test_errors_of_work_are_its_own() -> None:
    @coroutine
    def fails() -> Generator[None, None, None]:
        yield
        raise ValueError("this")

    async def work() -> None:
        await fails()

    with pytest.raises(ValueError, match="this"):
        await Paused().share.run(work())


async def test_long_lists_are_made_in_steps() -> None:
    async with counted_turns() as turns:
        seen = await in_steps(lambda each: (each, turns.count), range(A_STEP * 5))
    assert [each for each, _ in seen] == list(range(A_STEP * 5))
    assert len({turn for _, turn in seen}) == 5
