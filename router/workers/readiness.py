"""Sets the router's health from its workers: SERVING while some worker is usable and the router does not drain."""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.placement.worker_model import WorkerModel
from router.workers.pool import WorkerPool


class HealthSwitch(Protocol):
    """The health service, as readiness uses it."""

    async def ready(self) -> None: ...

    async def not_ready(self) -> None: ...


class Readiness:
    """Implements PoolListener. `first` is set when the first worker can be used."""

    def __init__(self, pool: WorkerPool, *servers: HealthSwitch) -> None:
        """`servers` are the health services of the router's ports."""
        self._pool, self._servers = pool, servers
        self._changed = asyncio.Event()
        self.first = asyncio.Event()
        self.ready = False
        pool.listen(self)

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        self._changed.set()

    def cache_lost(self, worker_id: str) -> None:
        """Do nothing: the worker is still usable."""

    async def run(self) -> None:
        """Follow the pool until this task is cancelled; health then stays as it is."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            usable = self._pool.usable
            if usable == self.ready:
                continue
            for health in self._servers:
                await (health.ready() if usable else health.not_ready())
            # Last: after a failure above, the next change tries again.
            self.ready = usable
            if usable:
                self.first.set()
