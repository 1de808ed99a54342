"""Keeps the health of the router in step with its workers: SERVING while one may be given work and nothing drains."""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.workers.pool import WorkerPool


class HealthSwitch(Protocol):
    """What tells health checks whether the router serves."""

    async def ready(self) -> None: ...

    async def not_ready(self) -> None: ...


class Readiness:
    """Implements PoolListener. `first` is set when the first worker can be used."""

    def __init__(self, pool: WorkerPool, health: HealthSwitch) -> None:
        self._pool, self._health = pool, health
        self._changed = asyncio.Event()
        self.first = asyncio.Event()
        self.ready = False
        pool.listen(self)

    def capacity_changed(self) -> None:
        """Have another look."""
        self._changed.set()

    def cache_lost(self, worker_id: str) -> None:
        """Nothing to do: the worker is there."""

    async def run(self) -> None:
        """Follow the pool until this task is cancelled; then health is whatever it was."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._pool.usable == self.ready:
                continue
            self.ready = not self.ready
            if self.ready:
                await self._health.ready()
                self.first.set()
            else:
                await self._health.not_ready()
