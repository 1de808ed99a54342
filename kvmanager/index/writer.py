"""The manager's side of the prefix index of its pool, whose keys name the pool's identity.

Publishing therefore starts with the first worker. It starts again when all workers have left and the next one has
another identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import StaleEpoch, Unavailable
from common.contracts.index_format import DiscoveredWorker
from common.contracts.lease import Attach, public_incarnation
from common.process.supervised import Supervisor, cancel_and_wait
from kvmanager.contracts.index_events import IndexEvent, IndexSnapshot
from kvmanager.contracts.ports import IndexStore, IndexUnavailable, KeptPins
from kvmanager.index.epoch import EpochKeeper
from kvmanager.index.publisher import PrefixPublisher, PublisherTimes
from kvmanager.index.state_file import EpochFile
from kvmanager.index.worker_feed import WorkerFeed

_LEAVE_S: Final = 5.0  # for the last write; one that takes longer has failed


@dataclass(slots=True)
class _Namespace:
    """The epoch and the publisher of one namespace; without Redis there are epochs alone."""

    name: str
    epochs: EpochKeeper
    store: IndexStore | None = None
    publisher: PrefixPublisher | None = None
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self) -> None:
        """Stop publishing; unwritten changes are lost."""
        if self.task is not None and self.publisher is not None:
            self.publisher.stop()
            await cancel_and_wait(self.task)
        if self.store is not None:
            await self.store.close()

    async def leave(self) -> None:
        """Stop publishing after the last worker of this namespace has left, and make its entries dead."""
        if self.task is not None and self.publisher is not None:
            self.publisher.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self.ended.wait()
            await self.publisher.retire_all()
        await self.close()


class IndexWriter:
    """Epoch and publisher of one namespace. `open_store` makes the store of a namespace; None: there is no Redis.

    `on_stale` is called once for each time that this manager leads, when another one has taken over. `supervisor` keeps
    the publisher running. `pool_key` signs what discovery reads.
    """

    before_writing: Callable[[str], Awaitable[None]] | None = None
    """Awaited with the name of each namespace before this manager takes an epoch there."""

    def __init__(
        self,
        file: EpochFile,
        open_store: Callable[[str], IndexStore] | None,
        clock: Clock,
        times: PublisherTimes,
        on_stale: Callable[[StaleEpoch], None],
        pool_key: bytes | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._supervisor = supervisor or Supervisor()
        self._pool_key = pool_key
        self._file, self._open_store, self._clock, self._times = file, open_store, clock, times
        self._on_stale, self._stale_known = on_stale, False
        self._floor = 0
        self._past: PrefixPublisher | None = None
        self._namespace: _Namespace | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """The epoch held now; 0 before the first worker attaches."""
        return self._namespace.epochs.epoch if self._namespace else 0

    @property
    def publisher(self) -> PrefixPublisher | None:
        """The publisher of the index; None without Redis, and before the first worker attaches."""
        return self._namespace.publisher if self._namespace else None

    @property
    def namespace(self) -> object | None:
        """What is written now; another object after each change. None before the first attach, and after `stand_by`."""
        return self._namespace

    async def read_pins(self, most_bytes: int) -> KeptPins | None:
        """Return the stored pins; None without any, or without Redis. Raises IndexUnavailable, PinsUnreadable."""
        store = self._namespace.store if self._namespace else None
        return await store.read_pins(most_bytes) if store is not None else None

    async def has_lost_pins(self) -> bool:
        """Return whether Redis has no pins. Raises IndexUnavailable."""
        store = self._namespace.store if self._namespace else None
        return store is not None and not await store.has_pins()

    async def write_pins(self, value: bytes) -> None:
        """Store the pins; nothing is stored without Redis.

        Raises IndexUnavailable, FenceLost until the publisher has renewed the fence, StaleEpoch, and Unavailable
        without a namespace.
        """
        namespace = self._namespace
        if namespace is None:
            raise Unavailable("this KV manager has stopped leading, or no worker has attached yet; try again")
        if namespace.store is None:
            return
        try:
            await namespace.store.write_pins(await namespace.epochs.fenced(), value)
        except StaleEpoch as error:
            if namespace is self._namespace:
                self._stale(error)
            raise

    async def epoch_for(self, attach: Attach) -> int:
        """Return the epoch for the answer to an Attach. Raises StaleEpoch, and Unavailable after `stand_by`.

        An identity with another namespace starts that namespace. No worker of the old one may be attached then.
        """
        name = attach.identity.namespace
        if not self._writes(name) and self.before_writing is not None:
            await self.before_writing(name)
        namespace = self._in(name)
        try:
            epoch = await namespace.epochs.for_attach(attach.epoch_seen)
        except StaleEpoch as error:
            self._stale(error)
            raise
        if namespace is not self._namespace:
            raise Unavailable("this KV manager has stopped leading its group")
        return epoch

    async def lead(self, name: str) -> None:
        """Take the epoch of a namespace at once, so that the last leader can write there no more."""
        with suppress(IndexUnavailable):
            await self._in(name).epochs.fenced()

    async def stand_by(self) -> None:
        """Stop writing: another manager leads. Unwritten changes are lost; the leader publishes everything."""
        self._floor, self._stale_known = max(self._floor, self.epoch), False
        namespace, self._namespace = self._namespace, None
        if namespace is not None:
            self._past = namespace.publisher
            await namespace.close()

    def open_feed(self, attach: Attach, snapshot: Callable[[], IndexSnapshot]) -> WorkerFeed | None:
        """Begin to publish a worker; None without Redis."""
        if self.publisher is None:
            return None
        life = public_incarnation(attach.incarnation).hex()
        worker = DiscoveredWorker(attach.worker_id, attach.address, life, attach.identity)
        return self.publisher.open(worker, snapshot, attach.session)

    def push(self, feed: WorkerFeed, events: tuple[IndexEvent, ...]) -> None:
        feed.push(events)
        if self.publisher is not None:
            self.publisher.wake()

    def close_feed(self, feed: WorkerFeed) -> None:
        if self.publisher is not None:
            self.publisher.close(feed)

    async def flush(self, timeout: float) -> bool:
        """Wait until the index holds everything; return False after `timeout` seconds."""
        if self.publisher is None:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self.publisher.settled()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop publishing; unwritten changes are lost."""
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._namespace is not None:
            await self._namespace.close()
        await self._supervisor.aclose()

    def _writes(self, name: str) -> bool:
        return self._namespace is not None and self._namespace.name == name

    def _in(self, name: str) -> _Namespace:
        """Return the namespace of this name; begin it if another one, or none, is written."""
        old = self._namespace
        if old is not None and old.name == name:
            return old
        self._namespace = self._begin(name)
        if old is not None:
            self._leave(old)
        return self._namespace

    def _begin(self, name: str) -> _Namespace:
        store = self._open_store(name) if self._open_store else None
        epochs = EpochKeeper(self._file, store, floor=max(self._floor, self.epoch))
        namespace = _Namespace(name, epochs, store)
        if store is not None:
            publisher = PrefixPublisher(store, namespace.epochs, self._clock, self._times, pool_key=self._pool_key)
            if (past := self.publisher or self._past) is not None:
                publisher.counts = past.counts  # a counter must not fall
            namespace.publisher = publisher
            namespace.task = self._supervisor.run_task("prefix-publisher", partial(self._publish, namespace, publisher))
        return namespace

    def _leave(self, namespace: _Namespace) -> None:
        task = asyncio.create_task(namespace.leave(), name="prefix-publisher-leaving")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _publish(self, namespace: _Namespace, publisher: PrefixPublisher) -> None:
        """Publish to the end, and then wait to be cancelled: the supervisor would begin it again."""
        try:
            await publisher.run()
        except StaleEpoch as error:
            if publisher is self.publisher:  # another manager may serve a namespace that this one has left
                self._stale(error)
        namespace.ended.set()
        await asyncio.Event().wait()

    def _stale(self, error: StaleEpoch) -> None:
        """Call `on_stale` once; an attach and the publisher can both find that another manager has taken over."""
        known, self._stale_known = self._stale_known, True
        if not known:
            self._on_stale(error)
