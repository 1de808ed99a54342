"""Finds workers in Redis. Each has a key that its manager or the worker renews, and that expires without renewal.

A worker's stream shows that it is alive, not its key. A connected worker stays in use whatever Redis holds, and time in
which Redis cannot be read does not count against a key.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.clock import Clock
from common.index_format import DISCOVERY_WORKERS_KEY, DiscoveredWorker, discovered_from_json, discovery_key
from common.types import PoolIdentity
from router.core.identity import differences

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class Members(Protocol):
    """The methods of the worker pool that discovery uses."""

    @property
    def identity(self) -> PoolIdentity: ...

    def add(self, address: str) -> None: ...

    def remove(self, address: str) -> None: ...

    def is_connected(self, address: str) -> bool: ...


@dataclass(slots=True)
class _Found:
    worker: DiscoveredWorker
    seen: float


class Discovery:
    """Adds to a pool the workers that have keys in Redis, and removes them again; leaves configured addresses alone."""

    def __init__(self, redis: Redis, members: Members, clock: Clock, lease_seconds: float = 5.0) -> None:
        """A worker without a connection and without a key is removed after `lease_seconds`."""
        self._redis, self._members, self._clock, self._lease = redis, members, clock, lease_seconds
        self._found: dict[str, _Found] = {}
        self._passed_over: set[str] = set()
        self.connected = False

    async def run(self) -> None:
        """Poll every second until this task is cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        """Poll once. While Redis cannot be read nothing changes."""
        try:
            workers = await self._read()
        except (RedisError, OSError) as error:
            if self.connected:
                log.warning("discovery cannot read Redis", extra={"reason": str(error)})
            self.connected = False
            return
        if not self.connected:
            # Redis could not be read for a while: each key gets a whole lease to appear again.
            for found in self._found.values():
                found.seen = self._clock.monotonic()
        self.connected = True
        self._take(workers)

    async def _read(self) -> list[DiscoveredWorker]:
        names = sorted(cast("set[bytes]", await self._redis.smembers(DISCOVERY_WORKERS_KEY)))
        if not names:
            return []
        values = cast("list[bytes | None]", await self._redis.mget([discovery_key(name.decode()) for name in names]))
        workers = (discovered_from_json(value) for value in values if value is not None)
        return [worker for worker in workers if worker is not None]

    def _take(self, workers: list[DiscoveredWorker]) -> None:
        now = self._clock.monotonic()
        for worker in workers:
            if self._serves_this_pool(worker):
                if worker.address not in self._found:
                    log.info("worker %s found", worker.worker_id, extra={"address": worker.address})
                self._found[worker.address] = _Found(worker, now)
                self._members.add(worker.address)
        for address, found in list(self._found.items()):
            if now - found.seen >= self._lease and not self._members.is_connected(address):
                log.info("worker %s is gone", found.worker.worker_id, extra={"address": address})
                del self._found[address]
                self._members.remove(address)

    def _serves_this_pool(self, worker: DiscoveredWorker) -> bool:
        """Return whether a worker is of this pool: pools of other models or block sizes may share one Redis."""
        found = differences(self._members.identity, worker.identity)
        if found and worker.worker_id not in self._passed_over:
            self._passed_over.add(worker.worker_id)
            log.info("worker %s serves another pool", worker.worker_id, extra={"reason": "; ".join(map(str, found))})
        return not found
