"""What the tests' own waiting does: it returns the value awaited, and its failure names what was awaited."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from tests.support.waiting import until, wait_until


async def test_the_value_that_holds_is_returned_and_other_tasks_run_between_two_looks() -> None:
    seen: list[int] = []

    async def others() -> None:
        for number in range(5):
            seen.append(number)
            await asyncio.sleep(0)

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
