"""Supervises the background tasks of a service.

The event loop does not report the exception of a task that is not awaited, and the service goes on without the task. A
supervised task that ends is logged and reported, so that health shows it. Then it is begun again, or the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from common.backoff import Backoff

log = logging.getLogger(__name__)

Begin = Callable[[], Coroutine[Any, Any, object]]
Report = Callable[[tuple[str, ...]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Restarts:
    """Pauses before a task is begun again, and the seconds after which it counts as sound."""

    pause: Backoff
    sound_after: float


_CANCEL_AGAIN_S: Final = 1.0
_RESTARTS: Final = Restarts(Backoff(first=0.1, longest=5.0, jitter=0.5), sound_after=5.0)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and return once they have ended; their results and exceptions are dropped.

    Before Python 3.12 a cancellation gets lost when it meets the end of `asyncio.wait_for`, which redis-py uses.
    Tasks that go on are therefore cancelled again.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """The background tasks of one service, on one event loop.

    `report` gets the names of the failing tasks whenever they change. `lost` is set when a task has ended that cannot
    be begun again: the process has to end.
    """

    def __init__(self, report: Report | None = None, restarts: Restarts = _RESTARTS) -> None:
        self._report, self._restarts = report, restarts
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watched: set[asyncio.Task[Any]] = set()
        self._failing: dict[str, str] = {}
        self._closing = False
        self.lost = asyncio.Event()

    @property
    def failing(self) -> tuple[str, ...]:
        """The names of the tasks that have ended, until they have run for a while again."""
        return tuple(self._failing)

    def run_task(self, name: str, begin: Begin) -> asyncio.Task[None]:
        """Keep `begin()` running until `aclose`, or until the returned task is cancelled. It is not meant to return."""
        return self._keep(asyncio.create_task(self._again_and_again(name, begin), name=f"supervised {name}"))

    def watch_task(self, name: str, task: asyncio.Task[Any]) -> None:
        """Set `lost` when a task ends that cannot be begun again. Its owner calls `forget` before it ends the task."""
        self._watched.add(task)
        task.add_done_callback(lambda ended: self._watched_ended(name, ended))

    def forget_task(self, task: asyncio.Task[Any]) -> None:
        """Watch a task no longer."""
        self._watched.discard(task)

    async def aclose(self) -> None:
        """Cancel the tasks of `run`, and wait until they have ended; forget those of `watch`."""
        self._closing = True
        self._watched.clear()
        await cancel_and_wait(*self._tasks)

    async def _again_and_again(self, name: str, begin: Begin) -> None:
        failures, loop = 0, asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                why = await self._once(name, begin)
                failures = failures + 1 if loop.time() - began < self._restarts.sound_after else 1
                pause = self._restarts.pause.pause(failures, random.random())
                self._fail(name, why, f"it is begun again in {pause:.1f} s")
                await asyncio.sleep(pause)
        finally:
            self._sound(name)

    async def _once(self, name: str, begin: Begin) -> BaseException | None:
        """Run the task to its end; return its exception. Raises CancelledError when the supervision is cancelled."""
        sound = asyncio.get_running_loop().call_later(self._restarts.sound_after, self._sound, name)
        try:
            await begin()
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if self._closing or (current is not None and current.cancelling()):
                raise
            return error  # something that the task awaited was cancelled
        # Broad: a supervised task may end by any bug.
        except Exception as error:  # noqa: BLE001
            return error
        finally:
            sound.cancel()
        return None

    def _watched_ended(self, name: str, task: asyncio.Task[Any]) -> None:
        if task in self._watched:
            self._watched.discard(task)
            why = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._fail(name, why, "the process has to end")
            self.lost.set()

    def _fail(self, name: str, why: BaseException | None, then: str) -> None:
        log.error("background task %s ended (%s): %s", name, repr(why) if why else "it returned", then, exc_info=why)
        self._failing[name] = then
        self._report_failing()

    def _sound(self, name: str) -> None:
        if self._failing.pop(name, None) is not None:
            self._report_failing()

    def _report_failing(self) -> None:
        if self._report is not None and not self._closing:
            self._keep(asyncio.ensure_future(_report(self._report, self.failing)))

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Hold a reference: the event loop alone has weak ones."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _report(report: Report, failing: tuple[str, ...]) -> None:
    try:
        await report(failing)
    # Broad: a bug in the report must not end the supervision without a word.
    except Exception:
        log.exception("the failing tasks could not be reported: %s", ", ".join(failing) or "none")
