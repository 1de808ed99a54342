"""The manager's side of the index for one pool: made when the pool's identity is known, because its keys name it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from common.clock import Clock
from common.errors import StaleEpoch
from common.index_format import DiscoveredWorker
from common.lease import Attach
from kvmanager.core.index_events import IndexEvent, IndexSnapshot
from kvmanager.epoch import EpochKeeper
from kvmanager.ports import IndexStore
from kvmanager.prefix_publisher import PrefixPublisher, PublisherTimes
from kvmanager.state_file import EpochFile
from kvmanager.worker_feed import WorkerFeed


class IndexWriter:
    """Epoch and publisher of one namespace. `open_store` makes the store of a namespace; None: there is no Redis.

    `on_stale` is called once, when another manager has taken over.
    """

    def __init__(
        self,
        file: EpochFile,
        open_store: Callable[[str], IndexStore] | None,
        clock: Clock,
        times: PublisherTimes,
        on_stale: Callable[[StaleEpoch], None],
    ) -> None:
        self._file, self._open_store, self._clock, self._times = file, open_store, clock, times
        self._on_stale = on_stale
        self._epochs: EpochKeeper | None = None
        self._store: IndexStore | None = None
        self._task: asyncio.Task[None] | None = None
        self.publisher: PrefixPublisher | None = None

    @property
    def epoch(self) -> int:
        """The epoch held now; 0 before the first worker attaches."""
        return self._epochs.epoch if self._epochs else 0

    async def epoch_for(self, attach: Attach) -> int:
        """Return the epoch for the answer to an Attach. Raises StaleEpoch."""
        if self._epochs is None:
            self._start(attach.identity.namespace)
        assert self._epochs is not None
        try:
            return await self._epochs.for_attach(attach.epoch_seen)
        except StaleEpoch as error:
            self._on_stale(error)
            raise

    def open_feed(self, attach: Attach, snapshot: Callable[[], IndexSnapshot]) -> WorkerFeed | None:
        """Begin to publish a worker; None without Redis."""
        if self.publisher is None:
            return None
        worker = DiscoveredWorker(attach.worker_id, attach.address, attach.incarnation.hex(), attach.identity)
        return self.publisher.open(worker, snapshot)

    def push(self, feed: WorkerFeed, events: tuple[IndexEvent, ...]) -> None:
        """Have changes of a worker written soon."""
        feed.push(events)
        if self.publisher is not None:
            self.publisher.wake()

    def close_feed(self, feed: WorkerFeed) -> None:
        """Stop publishing a worker."""
        if self.publisher is not None:
            self.publisher.close(feed)

    async def flush(self, timeout: float) -> bool:
        """Wait until the index holds everything; return whether that came true within `timeout` seconds."""
        if self.publisher is None:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self.publisher.settled()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop publishing; what is not written is lost."""
        if self._task is not None and self.publisher is not None:
            self.publisher.stop()
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._store is not None:
            await self._store.close()

    def _start(self, namespace: str) -> None:
        self._store = self._open_store(namespace) if self._open_store else None
        self._epochs = EpochKeeper(self._file, self._store)
        if self._store is not None:
            self.publisher = PrefixPublisher(self._store, self._epochs, self._clock, self._times)
            self._task = asyncio.create_task(self._publish(self.publisher), name="prefix-publisher")

    async def _publish(self, publisher: PrefixPublisher) -> None:
        try:
            await publisher.run()
        except StaleEpoch as error:
            self._on_stale(error)
