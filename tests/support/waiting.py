"""Waiting for a state that no event announces: look at it again and again, within a bound that no machine needs."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast, overload

PATIENCE_S = 60.0
_MOST_SHOWN = 400
_T = TypeVar("_T")


@overload
async def until(
    read: Callable[[], Awaitable[_T]],
    holds: Callable[[_T], object] = ...,
    *,
    every: float = ...,
    seconds: float = ...,
) -> _T: ...


@overload
async def until(
    read: Callable[[], _T], holds: Callable[[_T], object] = ..., *, every: float = ..., seconds: float = ...
) -> _T: ...


async def until(
    read: Callable[[], Any], holds: Callable[[Any], object] = bool, *, every: float = 0.01, seconds: float = PATIENCE_S
) -> Any:
    """Return the first value that `read` gives, or its awaitable, of which `holds` is true; look `every` so often.

    Other tasks run between two looks; `every=0` gives each of them one turn. Raise TimeoutError after so many
    `seconds`, with what was awaited and the last value.
    """
    looks = _Looks(read, holds, seconds)
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                found = read()
                if looks.end_with(await found if inspect.isawaitable(found) else found):
                    return looks.last
                await asyncio.sleep(every)
    except TimeoutError:
        if not limit.expired():
            raise  # the TimeoutError is that of `read`
        raise looks.failure() from None


def wait_until(
    read: Callable[[], _T],
    holds: Callable[[_T], object] = bool,
    *,
    every: float = 0.01,
    seconds: float = PATIENCE_S,
) -> _T:
    """Do what `until` does without an event loop; the thread sleeps between two looks."""
    looks, deadline = _Looks(read, holds, seconds), time.monotonic() + seconds
    while not looks.end_with(read()):
        if time.monotonic() > deadline:
            raise looks.failure()
        time.sleep(every)
    return cast("_T", looks.last)


class _Looks:
    """The last look at a state, and the error that names the state."""

    def __init__(self, read: Callable[[], object], holds: Callable[[Any], object], seconds: float) -> None:
        self._read, self._holds, self._seconds = read, holds, seconds
        self.last: object = "nothing was read"

    def end_with(self, found: object) -> bool:
        self.last = found
        return bool(self._holds(found))

    def failure(self) -> TimeoutError:
        wanted = [_shown(each) for each in (self._read, self._holds) if each is not bool]
        awaited = " / ".join(dict.fromkeys(wanted))  # lambdas of one line have the same source
        return TimeoutError(f"not within {self._seconds:g} s: {awaited}; last: {repr(self.last)[:_MOST_SHOWN]}")


def _shown(function: Callable[..., object]) -> str:
    """Return the place and the source of a function; its `repr` where it has no source."""
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return repr(function)
    return f"{file}:{first}: {' '.join(' '.join(lines).split())[:_MOST_SHOWN]}"
