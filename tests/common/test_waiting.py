"""What the tests' own waiting does: the value it returns, what its failure names, and when tasks are at rest."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import suppress

import pytest

from tests.support.turns import counted_turns, take_turn, until_blocked, until_idle
from tests.support.waiting import until, wait_until


async def test_the_value_that_holds_is_returned_and_other_tasks_run_between_two_looks() -> None:
    seen: list[int] = []

    async def others() -> None:
        for number in range(5):
            seen.append(number)
            await take_turn()

    task = asyncio.create_task(others())
    assert await until(lambda: len(seen), lambda found: found == 3, every=0) == 3
    await task


async def test_what_is_read_may_be_awaited() -> None:
    looks = iter([0, 0, 7])

    async def read() -> int:
        return next(looks)

    assert await until(read) == 7


async def test_a_failure_names_the_condition_and_the_last_value() -> None:
    async def read() -> str:
        return "the third state"

    with pytest.raises(TimeoutError) as caught:
        await until(read, lambda found: found == "the fourth state", seconds=0.0)
    said = str(caught.value)
    assert re.match(r"not within 0 s: .*test_waiting\.py:\d+: async def read.*test_waiting\.py:\d+: await until", said)
    assert said.endswith("last: 'the third state'")


async def test_a_look_that_never_ends_is_cut_off() -> None:
    cut = asyncio.Event()

    async def read() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    with pytest.raises(TimeoutError, match="nothing was read"):
        await until(read, seconds=0.0)
    assert cut.is_set()


async def test_a_timeout_of_the_state_itself_is_not_taken_for_the_bound() -> None:
    async def read() -> None:
        raise TimeoutError("of the state")

    with pytest.raises(TimeoutError, match=r"^of the state$"):
        await until(read)


def test_a_thread_waits_for_another_one() -> None:
    arrived = threading.Event()
    other = threading.Thread(target=arrived.set)
    other.start()
    assert wait_until(arrived.is_set)
    other.join()


def test_a_thread_fails_with_what_it_awaited() -> None:
    never_set: list[int] = []
    with pytest.raises(TimeoutError, match=r"not within 0 s: .*never_set.*; last: \[\]$"):
        wait_until(lambda: never_set, seconds=0.0)


# ------------------------------------------------------------ tasks and the loop at rest


async def steps(count: int, done: list[int], then: asyncio.Event) -> None:
    for number in range(count):
        done.append(number)
        await take_turn()
    await then.wait()


@pytest.mark.parametrize("count", [0, 1, 7])
async def test_tasks_are_blocked_once_they_wait_for_others_however_many_turns_they_take(count: int) -> None:
    done, held = list[int](), asyncio.Event()
    tasks = [asyncio.create_task(steps(each, done, held)) for each in (count, 2)]
    await until_blocked(*tasks)
    assert len(done) == count + 2
    assert not any(each.done() for each in tasks)
    held.set()
    await until_blocked(*tasks)
    assert all(each.done() for each in tasks)


async def test_a_cancelled_task_is_blocked_once_it_has_met_its_cancellation() -> None:
    held, met = asyncio.Event(), list[str]()

    async def loses_one() -> None:
        with suppress(asyncio.CancelledError):
            await held.wait()
        met.append("cancelled")
        await held.wait()

    task = asyncio.create_task(loses_one())
    await until_blocked(task)
    task.cancel()
    await until_blocked(task)
    assert (met, task.done()) == (["cancelled"], False)
    held.set()
    await task


async def test_the_loop_is_idle_once_tasks_and_callbacks_have_nothing_to_do() -> None:
    loop, done, held, called = asyncio.get_running_loop(), list[int](), asyncio.Event(), list[int]()

    def again(left: int) -> None:
        called.append(left)
        if left:
            loop.call_soon(again, left - 1)

    task = asyncio.create_task(steps(5, done, held))
    later = loop.call_later(3600.0, again, 0)
    again(9)
    await until_idle()
    assert (len(done), len(called)) == (5, 10)
    later.cancel()
    held.set()
    await task


async def test_turns_are_counted_while_others_take_theirs() -> None:
    async with counted_turns() as turns:
        before = turns.count
        await asyncio.gather(*(steps(10, [], event) for event in (set_event(), set_event())))
        assert turns.count - before >= 10


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
