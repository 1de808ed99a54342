"""Several groups publish their workers into one real index: a state machine of leaders, moves, zombies and wipes.

No manager changes what another one has published of a worker that has its latest session there. Whatever happened, once
every group that leads has written what is due, a router reads of each attached worker exactly what its latest session
has cached, and no two workers share a slot.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.clock import ManualClock
from common.contracts.errors import StaleEpoch
from common.contracts.index_format import DiscoveredWorker
from common.contracts.types import BlockHash
from common.process.local_redis import LocalRedis
from kvmanager.contracts.index_events import IndexEvent, IndexSnapshot, Removed, Stored
from kvmanager.index.epoch import EpochKeeper
from kvmanager.index.publisher import PrefixPublisher, PublisherTimes
from kvmanager.index.state_file import EpochFile
from kvmanager.index.store import RedisIndexStore
from kvmanager.index.worker_feed import WorkerFeed
from tests.support.kvmanager.fake_session import IDENTITY

NAMESPACE = IDENTITY.namespace
H = [BlockHash(bytes([number]) * 16) for number in range(6)]
# Few of each: what they do then concerns the others.
GROUPS, WORKERS = st.sampled_from(["a", "b"]), st.integers(0, 2)
SLOTS = range(8)
TIMES = PublisherTimes(prefix_ttl=3600.0, lease_ttl=600.0, linger=0.0)

T = TypeVar("T")


@dataclass
class Ledger:
    """What one session of a worker has cached, as the manager that has the session knows it."""

    members: set[BlockHash]
    number: int = 0

    def snapshot(self) -> IndexSnapshot:
        return IndexSnapshot(self.number, tuple((each, 0) for each in sorted(self.members)))

    def toggle(self, block_hash: BlockHash) -> IndexEvent:
        self.number += 1
        if block_hash in self.members:
            self.members.remove(block_hash)
            return Removed(self.number, block_hash, 0)
        self.members.add(block_hash)
        return Stored(self.number, block_hash, 0)


@dataclass
class Session:
    """A session of a worker at a manager. A manager that does not know of its end keeps the feed open."""

    worker: int
    manager: Manager
    ledger: Ledger
    feed: WorkerFeed


@dataclass
class Worker:
    life: int = 0
    sessions: int = 0
    now: Session | None = None


@dataclass
class Manager:
    """A process of a group; `leads` until a later one of its group has taken over."""

    group: str
    publisher: PrefixPublisher
    clock: ManualClock
    leads: bool = True
    ended: bool = False
    open: list[Session] = field(default_factory=list)


class GroupsMachine(RuleBasedStateMachine):
    """`server` is a Redis that each example empties."""

    server: LocalRedis

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._folder = TemporaryDirectory()
        self._generations = itertools.count(100)
        self.redis = Redis.from_url(self.server.url)
        self._run(self.redis.flushall())
        self._terms = itertools.count(1)
        self._stores: list[RedisIndexStore] = []
        self.workers: dict[int, Worker] = {number: Worker() for number in range(3)}
        self.managers: dict[str, Manager] = {}
        self.zombies: list[Manager] = []
        self.unfenced: set[str] = set()

    def _run(self, made: Awaitable[T]) -> T:
        async def wait() -> T:
            return await made

        return self._loop.run_until_complete(wait())

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            for store in self._stores:
                self._run(store.close())
            self._run(self.redis.aclose())
            self._loop.close()
            self._folder.cleanup()

    # ------------------------------------------------------------ steps

    @initialize()
    def begin(self) -> None:
        for group in ("a", "b"):
            self._lead(group)

    def _lead(self, group: str) -> None:
        redis = Redis.from_url(self.server.url)
        store = RedisIndexStore(redis, NAMESPACE, 3600.0, 600.0, lambda: 1000, next(self._terms), group)
        self._stores.append(store)
        file = EpochFile(Path(self._folder.name) / str(len(self._stores)))
        clock = ManualClock()
        publisher = PrefixPublisher(store, EpochKeeper(file, store), clock, TIMES, lambda: next(self._generations))
        self.managers[group] = Manager(group, publisher, clock)
        self._run(self._round(self.managers[group]))

    async def _round(self, manager: Manager) -> None:
        """Write what is due. A manager that another one of its group has replaced ends."""
        if manager.ended or (not manager.leads and manager.group in self.unfenced):
            return
        before = await self._published()
        others = {name for name, session in self._attached().items() if session.manager is not manager}
        try:
            assert await manager.publisher._round()
        except StaleEpoch:
            assert not manager.leads
            manager.ended = True
        if await self.redis.exists(index_format.fence_key(NAMESPACE, manager.group)):  # it may have written nothing
            self.unfenced.discard(manager.group)
        after = await self._published()
        for name in before.keys() & others:
            assert after.get(name) == before[name], f"a manager changed worker {name} of another one"

    @rule(group=GROUPS)
    def another_leads(self, group: str) -> None:
        """The last leader's process does not know that yet; its workers have left it."""
        last = self.managers[group]
        last.leads = False
        self.zombies.append(last)
        for worker in self.workers.values():
            if worker.now is not None and worker.now.manager is last:
                worker.now = None
        self._lead(group)

    @rule(number=WORKERS, group=GROUPS, new_life=st.booleans(), seen=st.booleans())
    def attach(self, number: int, group: str, new_life: bool, seen: bool) -> None:
        """A worker attaches, maybe in a new life; the manager that had it sees that only if it is `seen`."""
        worker, manager = self.workers[number], self.managers[group]
        before = worker.now
        if before is not None and (seen or before.manager is manager):
            self._close(before)
        kept = set() if new_life or before is None else set(before.ledger.members)
        worker.life += new_life
        worker.sessions = 1 if new_life else worker.sessions + 1
        ledger = Ledger(kept)
        life = f"life-{number}-{worker.life}"
        about = DiscoveredWorker(f"w{number}", "", life, IDENTITY)
        for other in [each for each in manager.open if each.worker == number]:
            self._close(other)
        feed = manager.publisher.open(about, ledger.snapshot, worker.sessions)
        worker.now = Session(number, manager, ledger, feed)
        manager.open.append(worker.now)

    def _close(self, session: Session) -> None:
        session.manager.open.remove(session)
        session.manager.publisher.close(session.feed)

    @rule(number=WORKERS)
    def leave(self, number: int) -> None:
        worker = self.workers[number]
        if worker.now is not None:
            self._close(worker.now)
            worker.now = None

    @rule(number=WORKERS, place=st.integers(0, len(H) - 1))
    def change(self, number: int, place: int) -> None:
        session = self.workers[number].now
        if session is not None:
            session.feed.push([session.ledger.toggle(H[place])])

    @rule(number=WORKERS)
    def clear(self, number: int) -> None:
        """The manager publishes the whole membership again, under a new generation."""
        for manager in (*self.managers.values(), *self.zombies):
            for session in manager.open:
                if session.worker == number:
                    session.feed.publish_all()

    @rule(group=GROUPS, renews=st.booleans())
    def write(self, group: str, renews: bool) -> None:
        manager = self.managers[group]
        if renews:
            manager.clock.advance(TIMES.lease_ttl / 2)
        self._run(self._round(manager))

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def zombie_writes(self, data: st.DataObject) -> None:
        manager = data.draw(st.sampled_from(self.zombies))
        manager.clock.advance(TIMES.lease_ttl / 2)
        self._run(self._round(manager))

    @rule()
    def wipe(self) -> None:
        """Until the leader of a group writes again, its lease alone keeps a past one from that: it is not modelled."""
        self._run(self.redis.flushall())
        self.unfenced = set(self.managers)

    @rule(slot=st.integers(0, 2))
    def liveness_ends(self, slot: int) -> None:
        self._run(self.redis.delete(index_format.liveness_key(NAMESPACE, slot)))

    # ------------------------------------------------------------ what must hold

    @rule()
    def settle(self) -> None:
        """Let every manager see which sessions are over, and every leader write. Then the index is exact."""
        for manager in (*self.managers.values(), *self.zombies):
            for session in list(manager.open):
                if self.workers[session.worker].now is not session:
                    self._close(session)
        self._run(self._settled())

    def _attached(self) -> dict[str, Session]:
        return {f"w{number}": each.now for number, each in self.workers.items() if each.now is not None}

    async def _published(self) -> dict[str, tuple[int, int, frozenset[BlockHash]]]:
        """Return slot, generation and entries of workers whose latest session is published, and renewed in time."""
        found, attached = {}, self._attached()
        for worker_id, (slot, generation, alive, members) in (await self._read()).items():
            session = attached.get(worker_id)
            if session is not None and alive and session.feed.generation == generation:
                found[worker_id] = (slot, generation, members)
        return found

    async def _read(self) -> dict[str, tuple[int, int, bool, frozenset[BlockHash]]]:
        """Return slot, generation, liveness and live entries by worker, as a router finds them."""
        root, pipeline = index_format.prefix_key_root(NAMESPACE), self.redis.pipeline()
        for slot in SLOTS:
            pipeline.hgetall(index_format.slot_key(NAMESPACE, slot))
            pipeline.exists(index_format.liveness_key(NAMESPACE, slot))
        pipeline.mget([root + each for each in H])
        *of_slots, values = await pipeline.execute()
        held = [index_format.unpack_entries(value or b"") for value in values]
        found: dict[str, tuple[int, int, bool, frozenset[BlockHash]]] = {}
        for slot, fields, alive in zip(SLOTS, of_slots[::2], of_slots[1::2], strict=True):
            owner = index_format.owner_from_fields(cast("dict[bytes, bytes]", fields))
            if owner is not None:
                entry = (slot, owner.generation)
                members = frozenset(each for each, entries in zip(H, held, strict=True) if entry in entries)
                assert owner.worker_id not in found, "a worker with two slots"
                found[owner.worker_id] = (*entry, bool(alive), members)
        return found

    async def _settled(self) -> None:
        # More than a lease later.
        await self.redis.delete(*(index_format.liveness_key(NAMESPACE, slot) for slot in SLOTS))
        for _ in range(3):
            for manager in (*self.managers.values(), *self.zombies):
                manager.clock.advance(2 * TIMES.lease_ttl)
                await self._round(manager)
                await self._round(manager)
        found, attached = await self._read(), self._attached()
        for worker_id, session in attached.items():
            assert found[worker_id][3] == session.ledger.members, worker_id
            assert not session.feed.behind
        # A manager that was replaced retires nobody: entries of its workers that attach no more end by their lifetime.
        for worker_id in () if self.zombies else found.keys() - attached.keys():
            assert found[worker_id][3] == set()


@pytest.mark.timeout(600)
def test_groups_on_one_index(redis_server: LocalRedis) -> None:
    class Machine(GroupsMachine):
        server = redis_server

    run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
