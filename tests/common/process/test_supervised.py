"""Background tasks that end are logged, reported and begun again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from common.backoff import Backoff
from common.process.supervised import Restarts, Supervisor
from tests.support.turns import until_blocked

PATIENCE_S = 60.0
AT_ONCE = Backoff(first=0.001, longest=0.002)
NEVER_SOUND, SOON_SOUND = Restarts(AT_ONCE, sound_after=PATIENCE_S), Restarts(AT_ONCE, sound_after=0.01)


class Reports:
    """The names that were reported, and a wait for some of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []
        self._changed = asyncio.Event()

    async def __call__(self, failing: tuple[str, ...]) -> None:
        self.seen.append(failing)
        self._changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def supervising(reports: Reports, restarts: Restarts) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(reports, restarts)
    try:
        yield supervisor
    finally:
        await supervisor.aclose()


async def test_a_task_that_raises_is_logged_reported_and_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    begun, reports = [0], Reports()

    async def fails_once() -> None:
        begun[0] += 1
        if begun[0] == 1:
            raise ZeroDivisionError("a bug")
        await asyncio.Event().wait()

    async with supervising(reports, SOON_SOUND) as supervisor:
        supervisor.run_task("watch", fails_once)
        await reports.until(lambda: reports.seen == [("watch",), ()])
        assert begun == [2]
        assert not supervisor.lost.is_set()
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "background task watch ended (ZeroDivisionError('a bug'))" in record.getMessage()
    assert record.exc_info is not None


async def test_a_task_that_fails_again_and_again_is_failing_all_the_time() -> None:
    reports, begun = Reports(), asyncio.Semaphore(0)

    async def fails() -> None:
        begun.release()
        raise ValueError

    async with supervising(reports, NEVER_SOUND) as supervisor:
        supervisor.run_task("poll", fails)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(5):
                await begun.acquire()
        assert supervisor.failing == ("poll",)
        assert set(reports.seen) == {("poll",)}


@pytest.mark.parametrize("how", ["returns", "cancelled inside"])
async def test_a_task_that_ends_without_a_bug_of_its_own_is_begun_again(how: str) -> None:
    reports, begun = Reports(), asyncio.Semaphore(0)

    async def ends() -> None:
        begun.release()
        if how == "cancelled inside":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    async with supervising(reports, NEVER_SOUND) as supervisor:
        supervisor.run_task("poll", ends)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await begun.acquire()
        assert supervisor.failing == ("poll",)


async def test_a_task_that_cannot_be_begun_again_is_lost() -> None:
    reports = Reports()

    async def ends() -> None:
        raise OSError("the listener is gone")

    async with supervising(reports, NEVER_SOUND) as supervisor:
        task = asyncio.create_task(ends())
        supervisor.watch_task("http", task)
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.lost.wait()
        await reports.until(lambda: reports.seen == [("http",)])
        with suppress(OSError):
            await task


async def test_a_watched_task_that_its_owner_ends_is_not_lost() -> None:
    reports = Reports()
    async with supervising(reports, NEVER_SOUND) as supervisor:
        task = asyncio.create_task(asyncio.Event().wait())
        supervisor.watch_task("http", task)
        supervisor.forget_task(task)
        task.cancel()
        await asyncio.wait([task])  # the watch hears of its end first: it was there before
        assert not supervisor.lost.is_set()
    assert reports.seen == []


async def test_closing_ends_the_tasks_and_reports_nothing() -> None:
    reports, ended = Reports(), asyncio.Event()

    async def runs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with supervising(reports, NEVER_SOUND) as supervisor:
        watched = asyncio.create_task(asyncio.Event().wait())
        supervisor.watch_task("http", watched)
        await until_blocked(supervisor.run_task("watch", runs))
    watched.cancel()
    await asyncio.wait([watched])
    assert ended.is_set()
    assert reports.seen == []
    assert not supervisor.lost.is_set()


async def test_closing_cancels_again_a_task_that_lost_its_cancellation() -> None:
    """`asyncio.wait_for` of Python 3.11 loses one that comes as it ends."""
    reports, lost = Reports(), asyncio.Event()

    async def loses_one() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_S):
        async with supervising(reports, NEVER_SOUND) as supervisor:
            task = supervisor.run_task("publisher", loses_one)
            await until_blocked(task)
        assert lost.is_set()
        assert task.cancelled()


async def test_a_task_that_its_owner_cancels_is_not_failing() -> None:
    reports, begun = Reports(), asyncio.Event()

    async def fails() -> None:
        begun.set()
        raise ValueError

    async with supervising(reports, NEVER_SOUND) as supervisor:
        task = supervisor.run_task("worker w0", fails)
        await reports.until(lambda: reports.seen == [("worker w0",)])
        task.cancel()
        await reports.until(lambda: reports.seen[-1] == ())
        assert supervisor.failing == ()
        assert task.cancelled()


async def test_a_report_that_fails_does_not_end_the_supervision(caplog: pytest.LogCaptureFixture) -> None:
    begun = asyncio.Semaphore(0)

    async def fails() -> None:
        begun.release()
        raise ValueError

    async def report(failing: tuple[str, ...]) -> None:
        raise RuntimeError("a bug in the report")

    supervisor = Supervisor(report, NEVER_SOUND)
    supervisor.run_task("poll", fails)
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            await begun.acquire()
    await supervisor.aclose()
    assert "could not be reported: poll" in caplog.text
