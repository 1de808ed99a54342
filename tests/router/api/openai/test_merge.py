"""Streams of several prompts that become one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from router.api.openai.service import merged
from tests.support.turns import until_idle


class Long:
    """A stream of numbers that are there at once, and how many were taken from it."""

    def __init__(self) -> None:
        self.taken = 0

    async def numbers(self) -> AsyncGenerator[int, None]:
        for number in range(1, 1001):
            self.taken = number
            yield number


async def test_streams_are_not_read_far_ahead_of_the_reader() -> None:
    streams = [Long() for _ in range(4)]
    async with aclosing(merged([each.numbers() for each in streams])) as events:
        await anext(events)
        await until_idle()
        assert sum(each.taken for each in streams) < 32
        seen = {(await anext(events))[0] for _ in range(100)}
    assert seen == {0, 1, 2, 3}


async def test_every_event_comes_once_and_in_order_of_its_stream() -> None:
    async def numbers(count: int) -> AsyncGenerator[int, None]:
        for number in range(count):
            yield number

    seen: dict[int, list[int]] = {}
    async for stream, number in merged([numbers(50), numbers(3), numbers(0)]):
        seen.setdefault(stream, []).append(number)
    assert seen == {0: list(range(50)), 1: [0, 1, 2]}
