"""Virtual time: sleeping costs nothing, order is that of times, and a program that waits for ever is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from cli.replay.simulation import Stuck, VirtualClock, VirtualLoop, run


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as made:
        yield made


def test_hours_pass_at_once_in_the_order_of_their_times(loop: VirtualLoop) -> None:
    came = list[tuple[str, float]]()
    clock = VirtualClock(loop)

    async def after(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        came.append((name, clock.monotonic()))

    async def program() -> int:
        await asyncio.gather(after(7200.0, "late"), after(0.5, "soon"), after(0.5, "then"))
        return clock.time_ns()

    assert run(loop, program()) == 7_200_000_000_000
    assert came == [("soon", 0.5), ("then", 0.5), ("late", 7200.0)]


def test_timeouts_are_in_virtual_time(loop: VirtualLoop) -> None:
    async def program() -> None:
        async with asyncio.timeout(3600.0):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run(loop, program())
    assert loop.time() == 3600.0


def test_a_program_that_waits_for_ever_is_an_error(loop: VirtualLoop) -> None:
    async def program() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="no timer would wake one"):
        run(loop, program())


def test_an_error_in_a_callback_ends_the_program_with_that_error(loop: VirtualLoop) -> None:
    def fail() -> None:
        raise ValueError("a defect")

    loop.call_later(1.0, fail)
    with pytest.raises(ValueError, match="a defect"):
        run(loop, asyncio.sleep(5.0))


def test_timers_of_one_time_run_in_the_order_in_which_they_were_scheduled(loop: VirtualLoop) -> None:
    came = list[int]()
    for number in range(3000):
        loop.call_at(1.0 + number % 2, came.append, number)
    run(loop, asyncio.sleep(5.0))
    assert came == [*range(0, 3000, 2), *range(1, 3000, 2)]
