"""What the pool does when its own side fails: the worker's stream is opened again, and the bug is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from cli.suite.stack import _LAST_REPLIES_SECONDS
from common.backoff import Backoff
from common.contracts.clock import ManualClock, SystemClock
from common.contracts.errors import Unavailable
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.draining import _LAST_REPLIES_S
from router.placement.shared_load import Notice, SharedLoad, Told, worker_key
from router.placement.worker_model import Capacity, WorkerModel, WorkerState
from router.workers.client import Pacing, RouterIdentity
from router.workers.codec import WorkerFacts
from router.workers.pool import LAST_WORDS_S, WorkerPool
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S, FakeWorker, running
from tests.support.waiting import until

QUICK = Pacing(Backoff(first=0.01, longest=0.05, jitter=0.5))


class Faulty:
    """A listener with a bug that shows once, when a worker has connected."""

    def __init__(self) -> None:
        self.bugs = [asyncio.InvalidStateError("a result twice")]

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        if self.bugs:
            raise self.bugs.pop()

    def cache_lost(self, worker_id: str) -> None:
        """Nothing is cached."""


async def test_a_bug_is_logged_as_what_it_is_and_costs_a_stream_but_no_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = FakeWorker()
    async with running(double):
        pool = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, SystemClock(), QUICK)
        pool.listen(Faulty())
        pool.add_worker(double.address)
        await double.until(lambda: double.streams == 2)
        await pool.aclose()
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.exc_info is not None
    assert str(logged.exc_info[1]) == "a result twice"


class Caches:
    """A listener that notes whose cache is lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def capacity_changed(self, reported: WorkerModel | None = None) -> None: ...

    def cache_lost(self, worker_id: str) -> None:
        self.lost.append(worker_id)


def facts(worker_id: str, incarnation: bytes) -> WorkerFacts:
    return WorkerFacts(worker_id, incarnation, IDENTITY, Capacity(64, 4, 8, 256), 1000, ())


async def test_workers_that_come_and_go_under_new_names_leave_nothing_behind() -> None:
    pool, caches = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, SystemClock(), QUICK), Caches()
    pool.listen(caches)
    for number in range(20):
        address = f"127.0.0.1:{number + 1}"
        pool.add_worker(address)
        (member,) = pool.members()
        pool.connected(member.client, facts(f"w{number}", bytes([number + 1]) * 16))
        pool.remove(address)
    assert caches.lost == [f"w{number}" for number in range(20)]
    assert not pool.members()
    await pool.aclose()


@pytest.mark.parametrize("leaves", ["disconnects", "is removed"])
async def test_what_was_at_a_worker_that_leaves_is_told_to_be_over_whatever_is_released_later(leaves: str) -> None:
    pool, shared = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, SystemClock(), QUICK), SharedLoad(b"a" * 8)
    pool.share_load(shared)
    pool.add_worker("127.0.0.1:1")
    (member,) = pool.members()
    key = worker_key("w0", b"a" * 16)
    pool.connected(member.client, facts("w0", b"a" * 16))
    model = member.model
    assert model is not None
    shared.tell(0.0)
    model.placed(2, 100, 4)
    assert shared.tell(0.1) == Notice(b"a" * 8, 2, False, {key: Told(2, 100)})
    if leaves == "disconnects":
        pool.disconnected(member.client, Unavailable("gone"))
    else:
        pool.remove("127.0.0.1:1")
    assert shared.tell(0.2) == Notice(b"a" * 8, 3, False, {key: Told(0, 0)})
    model.placed(-2, -100, -4)
    assert shared.tell(0.3) is None
    assert shared.tell(5.0) == Notice(b"a" * 8, 4, True, {})
    await pool.aclose()


async def test_a_worker_that_comes_back_as_another_process_has_lost_its_cache() -> None:
    pool, caches = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, SystemClock(), QUICK), Caches()
    pool.listen(caches)
    pool.add_worker("127.0.0.1:1")
    pool.add_worker("127.0.0.1:2")
    first, second = [member.client for member in pool.members()]
    pool.connected(first, facts("w0", b"a" * 16))
    pool.disconnected(first, Unavailable("gone"))
    pool.connected(first, facts("w0", b"a" * 16))
    assert caches.lost == []
    pool.disconnected(first, Unavailable("gone"))
    pool.connected(second, facts("w0", b"b" * 16))
    assert caches.lost == ["w0"]
    pool.disconnected(second, Unavailable("gone"))
    pool.connected(second, facts("w1", b"c" * 16))
    assert caches.lost == ["w0", "w0"]
    await pool.aclose()


async def test_the_time_in_which_the_router_itself_did_not_run_makes_no_worker_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.workers.pool.WATCH_SECONDS", 0.0)
    clock = ManualClock()
    pool = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, clock, QUICK)
    pool.add_worker("127.0.0.1:1")
    (member,) = pool.members()
    pool.connected(member.client, facts("w0", b"a" * 16))
    check, checked = pool.check, list[float]()

    def noted(late: float) -> None:
        check(late)
        checked.append(late)

    monkeypatch.setattr(pool, "check", noted)
    watch = asyncio.create_task(pool.watch_workers())
    await until(lambda: checked, every=0)
    for times in range(1, 4):
        clock.advance(20.0)  # the watch asked to be woken before that
        await until(lambda: checked.count(20.0), times.__eq__, every=0)
    monkeypatch.undo()
    assert member.state is WorkerState.CONNECTED
    clock.advance(11.0)
    pool.check()
    assert (member.state, member.reason) == (WorkerState.HUNG, "no heartbeat for 11.0 s")
    watch.cancel()
    await pool.aclose()


class Endless(FakeWorker):
    """A worker that does not end its stream when the router has ended its own."""

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        await super()._read(requests)
        await asyncio.Event().wait()


async def test_a_router_that_stops_does_not_wait_for_a_worker_whose_heartbeat_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.workers.pool.LAST_WORDS_S", 3600.0)
    clock, worker = ManualClock(), Endless()
    async with running(worker):
        pool = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, clock, QUICK)
        pool.add_worker(worker.address)
        async with asyncio.timeout(PATIENCE_S):
            await until(pool.models, every=0, seconds=PATIENCE_S)
            clock.advance(11.0)  # a frozen process is one reason for it
            await pool.aclose()


def test_the_last_words_to_workers_leave_time_to_close_everything_else() -> None:
    """A suite kills a router some seconds after its drain: telemetry and Redis are closed before that."""
    assert LAST_WORDS_S + _LAST_REPLIES_S <= _LAST_REPLIES_SECONDS / 2


async def test_the_pool_knows_which_workers_hand_over_without_a_look_at_all() -> None:
    double = FakeWorker()
    async with running(double):
        pool = WorkerPool(RouterIdentity("router", b"i" * 16), IDENTITY, SystemClock(), QUICK)
        pool.add_worker(double.address)
        await until(lambda: bool(pool.models()))
        (member,) = pool.members()
        kept = pool.migrating()
        assert not kept
        double.heartbeat(draining=True, migrating=True)
        await until(lambda: list(kept) == [member.client])
        double.heartbeat()
        await until(lambda: not kept)
        double.heartbeat(draining=True, migrating=True)
        await until(lambda: bool(kept))
        await double.kill()
        await until(lambda: not kept)
        await double.start()
        await until(lambda: bool(pool.models()))
        double.heartbeat(draining=True, migrating=True)
        await until(lambda: bool(kept))
        pool.remove(double.address)
        assert not kept
        await pool.aclose()
