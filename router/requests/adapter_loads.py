"""Loads of adapters that requests wait for at the router: one for all requests that wait for the same at one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from common.contracts.adapters import AdapterRef
from common.contracts.errors import DeadlineExceeded, Overloaded
from router.workers.client import WorkerClient

# Pauses between two attempts while all adapters in a worker's memory are in use.
_PAUSE_S: Final = 0.05
PATIENCE_S: Final = 60.0
"""Seconds that a request waits for an adapter that finds no room."""


@dataclass(slots=True)
class _Load:
    """A load that so many requests wait for. `full` is set once all adapters in the worker's memory were in use."""

    waiting: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Task[None] | None = None


class AdapterLoads:
    """Lives on the event loop. `now` reads the clock of deadlines."""

    def __init__(self, now: Callable[[], float], patience: float = PATIENCE_S) -> None:
        self._now, self._patience = now, patience
        self._running: dict[tuple[WorkerClient, AdapterRef], _Load] = {}

    async def load(
        self,
        client: WorkerClient,
        wanted: AdapterRef,
        deadline: float | None,
        interrupted: asyncio.Event,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        """Return once the adapter is in the worker's memory, or the request is interrupted.

        `give_way` is called where the adapter finds no room: that may last as long as streams of other adapters, so
        the place at the worker is to be free meanwhile. Raises Unavailable where the worker is lost, Overloaded where
        its memory stays full, DeadlineExceeded, and the worker's refusal.
        """
        load = self._running.get((client, wanted)) or self._begin(client, wanted)
        assert load.ended is not None
        timeout = None if deadline is None else max(0.0, deadline - self._now())
        left, full = asyncio.create_task(interrupted.wait()), asyncio.create_task(load.full.wait())
        ends: tuple[asyncio.Task[object], ...] = (load.ended, left)
        load.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                done, _ = await asyncio.wait((*ends, full), return_when=asyncio.FIRST_COMPLETED)
                if full in done:
                    give_way()
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed while adapter {wanted.name} was loaded") from None
        finally:
            load.waiting -= 1
            left.cancel()
            full.cancel()
        if load.ended in done:
            load.ended.result()

    def _begin(self, client: WorkerClient, wanted: AdapterRef) -> _Load:
        load = self._running[client, wanted] = _Load()
        load.ended = asyncio.create_task(self._load(client, wanted, load))
        load.ended.add_done_callback(lambda done: self._ended((client, wanted), load, done))
        return load

    async def _load(self, client: WorkerClient, wanted: AdapterRef, load: _Load) -> None:
        latest = self._now() + self._patience
        while True:
            try:
                return await client.load_adapter(wanted)
            except Overloaded:
                if not load.waiting:  # whoever comes next begins another one
                    return self._forget((client, wanted), load)
                if self._now() >= latest:
                    raise
                load.full.set()
            await asyncio.sleep(_PAUSE_S)

    def _ended(self, key: tuple[WorkerClient, AdapterRef], load: _Load, done: asyncio.Task[None]) -> None:
        self._forget(key, load)
        if not done.cancelled():
            done.exception()  # whoever waited may have left

    def _forget(self, key: tuple[WorkerClient, AdapterRef], load: _Load) -> None:
        if self._running.get(key) is load:
            del self._running[key]
