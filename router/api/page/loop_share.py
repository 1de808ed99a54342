"""A small share of the event loop for work that is not urgent: one step at a time, and a pause after each.

A step is what a coroutine does between two awaits. The pause is a multiple of the time that the step took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Final, NamedTuple, TypeVar

from common.contracts.clock import Clock

# All work together has a tenth of the loop.
IDLE: Final = 9
# A process that was stopped during a step need not make up for it.
MOST_PAUSE_S: Final = 1.0

ResultT = TypeVar("ResultT")


class _Step(NamedTuple):
    """What a coroutine waits for after a step, or its result at the end."""

    waits_for: Any
    is_last: bool = False


class LoopShare:
    def __init__(self, clock: Clock, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """`pause` waits for some seconds, and for one turn of the loop at least."""
        self._clock, self._pause = clock, pause
        self._one, self._free_at = asyncio.Lock(), 0.0

    @coroutine
    def run(self, work: Coroutine[Any, Any, ResultT]) -> Generator[Any, Any, ResultT]:
        """Return the result of a coroutine, whose steps take turns with those of others here."""
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                step = yield from self._step(resume).__await__()
                if step.is_last:
                    result: ResultT = step.waits_for
                    return result
                yield step.waits_for
            except asyncio.CancelledError as error:
                # A coroutine that has ended, by this cancellation too, cannot be resumed.
                if _has_ended(work):
                    raise
                resume = partial(work.throw, error)
            else:
                resume = partial(work.send, None)

    async def _step(self, resume: Callable[[], Any]) -> _Step:
        async with self._one:
            await self._pause(max(0.0, self._free_at - self._clock.monotonic()))
            began = self._clock.monotonic()
            try:
                return _Step(resume())
            except StopIteration as end:
                return _Step(end.value, is_last=True)
            finally:
                ended = self._clock.monotonic()
                self._free_at = ended + min(IDLE * (ended - began), MOST_PAUSE_S)


def _has_ended(work: Coroutine[Any, Any, Any]) -> bool:
    return getattr(work, "cr_frame", None) is None
