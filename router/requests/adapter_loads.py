"""Loads of adapters that requests wait for at the router: one for all requests that wait for the same at one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.contracts.adapters import AdapterRef
from common.contracts.errors import DeadlineExceeded, Overloaded
from router.workers.client import WorkerClient

# Pauses between two attempts while all adapters in a worker's memory are in use.
_PAUSE_S: Final = 0.05
PATIENCE_S: Final = 60.0
"""Seconds that a request waits for an adapter that finds no room."""


class AdapterLoads:
    """Lives on the event loop. `now` reads the clock of deadlines."""

    def __init__(self, now: Callable[[], float], patience: float = PATIENCE_S) -> None:
        self._now, self._patience = now, patience
        self._running: dict[tuple[WorkerClient, AdapterRef], asyncio.Task[None]] = {}

    async def load(
        self, client: WorkerClient, wanted: AdapterRef, deadline: float | None, interrupted: asyncio.Event
    ) -> None:
        """Return once the adapter is in the worker's memory, or the request is interrupted.

        Raises Unavailable where the worker is lost, Overloaded where its memory stays full, DeadlineExceeded, and the
        worker's refusal.
        """
        load = self._running.get((client, wanted))
        if load is None:
            load = self._running[client, wanted] = asyncio.create_task(self._load(client, wanted))
            load.add_done_callback(lambda done: self._ended((client, wanted), done))
        left = asyncio.create_task(interrupted.wait())
        timeout = None if deadline is None else max(0.0, deadline - self._now())
        try:
            done, _ = await asyncio.wait((load, left), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        if load in done:
            load.result()
        elif not done:
            raise DeadlineExceeded(f"the deadline passed while adapter {wanted.name} was loaded")

    async def _load(self, client: WorkerClient, wanted: AdapterRef) -> None:
        latest = self._now() + self._patience
        while True:
            try:
                return await client.load_adapter(wanted)
            except Overloaded:
                if self._now() >= latest:
                    raise
            await asyncio.sleep(_PAUSE_S)

    def _ended(self, key: tuple[WorkerClient, AdapterRef], done: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # whoever waited may have left
