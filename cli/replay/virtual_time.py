"""An asyncio event loop whose time jumps to the next timer, so that hours of waiting take no time.

Nothing waits for the outside: the loop is for coroutines and timers alone. Equal programs run equally: callbacks run
in the order of their times, and those of one time in the order in which they were scheduled.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_FEW: Final = 1024


class Stuck(RuntimeError):
    """Every coroutine waits, and no timer would ever wake one."""


class _NoWait(selectors.SelectSelector):
    """Reports no event; instead of waiting it lets the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("every coroutine waits, and no timer would wake one")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; its time is in seconds since its beginning."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        # The time of the next timer that is scheduled for a time that others have.
        self._free: dict[float, float] = {}
        self._most = _FEW
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a call. asyncio's heap keeps no order among equal times, so each timer gets the next float."""
        due = self._free.get(when, when)
        self._free[when] = math.nextafter(due, math.inf)
        if len(self._free) > self._most:
            self._free = {time: free for time, free in self._free.items() if time >= self.time()}
            self._most = max(_FEW, 2 * len(self._free))
        return super().call_at(due, callback, *args, context=context)


class VirtualClock:
    """The `Clock` of a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def time_ns(self) -> int:
        return int(self._loop.time() * 1e9)


def run(loop: VirtualLoop, program: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on the loop. Raises what a callback raised, too."""
    raised: list[BaseException] = []

    def stop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        raised.append(context.get("exception") or RuntimeError(context["message"]))
        loop.stop()

    loop.set_exception_handler(stop)
    task = loop.create_task(program)
    try:
        return loop.run_until_complete(task)
    except RuntimeError:
        if not raised:
            raise
        task.cancel()
        raise raised[0] from None
