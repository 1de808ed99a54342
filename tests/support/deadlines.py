"""Tests of deadlines that hold on any machine: a request that does not get far enough in time gets more time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

MOST_SECONDS = 60.0


class TooSlow(Exception):
    """The deadline passed before the request got as far as the test needs."""


async def with_enough_time(attempt: Callable[[float], Awaitable[None]], seconds: float) -> None:
    """Run an attempt with a deadline of `seconds`; whenever it raises TooSlow, again with four times as long."""
    while True:
        try:
            return await attempt(seconds)
        except TooSlow:
            if seconds > MOST_SECONDS:
                raise
        seconds *= 4
