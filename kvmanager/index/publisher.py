"""Writes the changes of every worker's prefix cache to Redis, off the reply path, and keeps leases alive.

One task writes, so that changes reach the index in the order in which they happened. While Redis is unreachable, the
changes wait, up to a bound. When Redis is back, or was wiped, everything that it lacks is published again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from common.backoff import Backoff
from common.contracts.clock import Clock, until_tick
from common.contracts.errors import StaleEpoch
from common.contracts.index_format import DiscoveredWorker, discovered_to_value
from kvmanager.contracts.index_events import IndexSnapshot
from kvmanager.contracts.ports import FenceLost, IndexStore, IndexUnavailable
from kvmanager.contracts.slots import Loss, NoSlot
from kvmanager.index.epoch import EpochKeeper
from kvmanager.index.worker_feed import WorkerFeed

log = logging.getLogger(__name__)

CALL_HASHES: Final = 256
QUEUE_HASHES: Final = 65_536
# Changes of a few steps travel in one call; meanwhile routers use their memory of their own choices (RoutedPrefixes).
LINGER_S: Final = 0.01
_LOST: Final = {
    Loss.TAKEN: "another group of KV managers has taken the slot of",
    Loss.GONE: "the index was wiped or overwritten: it has no slot of",
}
BACKOFF: Final = Backoff(first=0.1, longest=2.0)  # seconds after failed writes


@dataclass(frozen=True, slots=True)
class PublisherTimes:
    """Seconds: life of an entry and of a lease without renewal, and how long changes gather before a call."""

    prefix_ttl: float = 3600.0
    lease_ttl: float = 5.0
    linger: float = LINGER_S


@dataclass(slots=True)
class PublisherCounts:
    """Counts of calls, hashes added and removed, whole memberships published, and failures to reach the index."""

    calls: int = 0
    added: int = 0
    removed: int = 0
    republished: int = 0
    outages: int = 0


class PrefixPublisher:
    """Publishes the feeds that are open. `run` ends by `stop`, or by StaleEpoch when another manager has taken over."""

    def __init__(
        self,
        store: IndexStore,
        epochs: EpochKeeper,
        clock: Clock,
        times: PublisherTimes = PublisherTimes(),
        draw_generation: Callable[[], int] = lambda: secrets.randbits(32),
        pool_key: bytes | None = None,
    ) -> None:
        """`pool_key` signs what discovery reads."""
        self._pool_key = pool_key
        self._store, self._epochs, self._clock, self._times = store, epochs, clock, times
        self._draw = draw_generation
        self._feeds: list[WorkerFeed] = []
        self._retiring: list[tuple[float, WorkerFeed]] = []
        self._renew_at = self._refresh_at = clock.monotonic()
        self._wake, self._settled, self._stopping = asyncio.Event(), asyncio.Event(), False
        self.counts = PublisherCounts()
        self.reachable = True

    # ------------------------------------------------------------ feeds

    def open(self, worker: DiscoveredWorker, snapshot: Callable[[], IndexSnapshot], session: int = 0) -> WorkerFeed:
        """Begin to publish a worker, whose membership `snapshot` returns, under a new generation."""
        feed = WorkerFeed(worker, snapshot, self._draw, QUEUE_HASHES, session)
        self._feeds.append(feed)
        self._renew_at = self._clock.monotonic()
        self.wake()
        return feed

    def close(self, feed: WorkerFeed) -> None:
        """End a worker's feed; unless it comes back within the life of a lease, its entries are dead then."""
        feed.closed = True
        self._feeds.remove(feed)
        if feed.slot is not None:
            self._retiring.append((self._clock.monotonic() + self._times.lease_ttl, feed))

    def wake(self) -> None:
        """Wake the writing task: a feed has changed."""
        self._settled.clear()
        self._wake.set()

    @property
    def elsewhere(self) -> int:
        """Workers that another group publishes, although they are attached here."""
        return sum(feed.elsewhere for feed in self._feeds)

    @property
    def behind(self) -> int:
        """Hashes whose change is not in the index yet."""
        return sum(feed.behind for feed in self._feeds)

    async def settled(self) -> None:
        """Return once the index holds everything; wait while the index cannot be reached."""
        while self.behind:
            self.wake()
            await self._settled.wait()

    async def retire_all(self) -> None:
        """Make the entries of departed workers dead at once, or leave them to expire. Call it after `run` has ended."""
        with suppress(IndexUnavailable, FenceLost, StaleEpoch):
            await self._retire(self._epochs.epoch, until=math.inf)

    # ------------------------------------------------------------ the task

    def stop(self) -> None:
        """Make `run` end soon, also where its task loses a cancellation (see `cancel_and_wait`)."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Write until stopped. Raises StaleEpoch."""
        failures = 0
        while not self._stopping:
            if await self._round():
                failures = 0
                if await self._changed():
                    await asyncio.sleep(self._times.linger)
            else:
                failures += 1
                await asyncio.sleep(BACKOFF.pause(failures))

    async def _changed(self) -> bool:
        """Return True when a feed has changed, False when a lease is due."""
        try:
            async with asyncio.timeout(max(0.0, self._renew_at - self._clock.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _round(self) -> bool:
        """Do what is due; return whether the index took it."""
        self._wake.clear()
        try:
            epoch = await self._epochs.fenced()
            await self._renew(epoch)
            for feed in tuple(self._feeds):
                await self._publish(epoch, feed)
        except FenceLost as error:
            return await self._start_anew(error)
        except IndexUnavailable as error:
            self._note_outage(error)
            return False
        if not self.reachable:
            log.info("the prefix index can be reached again and holds everything")
        self.reachable = True
        if not self.behind:
            self._settled.set()
        return True

    async def _start_anew(self, error: FenceLost) -> bool:
        log.warning("%s; publishing everything again", error)
        for feed in self._feeds:
            feed.publish_all()
        self._renew_at = self._clock.monotonic()
        try:
            await self._epochs.renew_fence()
        except IndexUnavailable as unavailable:
            self._note_outage(unavailable)
            return False
        self.wake()
        return True

    def _note_outage(self, error: IndexUnavailable) -> None:
        if self.reachable:
            log.warning("the prefix index cannot be reached, changes wait: %s", error)
            self.counts.outages += 1
        self.reachable = False

    # ------------------------------------------------------------ what is due

    async def _publish(self, epoch: int, feed: WorkerFeed) -> None:
        if feed.republish and not feed.closed and not feed.elsewhere:
            await self._register(epoch, feed)
        if feed.slot is None or not len(feed.changes):
            return
        changes = feed.take()
        try:
            for call in changes.calls(CALL_HASHES):
                if feed.closed or self._stopping:
                    return
                if not await self._store.update(epoch, feed.slot, feed.generation, call):
                    self._renew_at = self._clock.monotonic()  # that tells why
                    self.wake()
                    return
                changes.sent(call)
                self.counts.calls += 1
                self.counts.added += len(call.adds)
                self.counts.removed += len(call.removes)
        finally:
            feed.put_back(changes)

    async def _register(self, epoch: int, feed: WorkerFeed) -> None:
        entry = feed.new_entry()
        slot = await self._store.register(epoch, entry)
        if slot is NoSlot.ELSEWHERE:
            if not feed.elsewhere:
                log.error("another group of KV managers publishes worker %s; a worker has one group", entry.worker_id)
            feed.elsewhere = True
            return
        feed.begin(None if isinstance(slot, NoSlot) else slot, entry.generation)
        self.counts.republished += 1
        if feed.slot is None:
            log.error("the prefix index has no slot left for worker %s", entry.worker_id)

    def _lost(self, feed: WorkerFeed, loss: Loss) -> None:
        """Publish a worker anew that has its slot no more."""
        if not feed.closed:
            log.warning("%s worker %s; it is published again", _LOST[loss], feed.worker.worker_id)
            feed.lose_slot()
            self.wake()

    async def _renew(self, epoch: int) -> None:
        """Prolong leases, retire workers that did not come back, and write entries again before they expire."""
        now = self._clock.monotonic()
        if now < self._renew_at:
            return
        slots = {feed.slot: feed for feed in self._feeds if feed.slot is not None}
        written = self._clock.time_ns() / 1e9
        discovery = {
            feed.worker.worker_id: discovered_to_value(feed.worker, self._pool_key, written)
            for feed in self._feeds
            if not feed.elsewhere
        }
        generations = {slot: feed.generation for slot, feed in slots.items()}
        for slot, loss in (await self._store.renew(epoch, generations, discovery)).items():
            self._lost(slots[slot], loss)
        for feed in tuple(self._feeds):
            if feed.elsewhere and not feed.closed:
                await self._register(epoch, feed)
        await self._retire(epoch, until=now)
        if now - self._refresh_at > self._times.prefix_ttl / 2:
            self._refresh_at = now
            for feed in self._feeds:
                feed.refresh()
        self._renew_at = now + until_tick(now, self._times.lease_ttl / 3)

    async def _retire(self, epoch: int, until: float) -> None:
        """Retire the workers whose time to come back ended before `until`."""
        while self._retiring and self._retiring[0][0] <= until:
            feed = self._retiring[0][1]
            if feed.slot is not None:
                await self._store.retire(epoch, feed.slot, feed.generation, feed.worker.worker_id)
            self._retiring.pop(0)
