"""Loads of adapters that requests wait for at the router: one for all requests that wait for the same at one worker.

A worker whose memory is full is asked again and again: so the load keeps its place in the worker's line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from common.contracts.adapters import NOBODYS, AdapterRef, AdapterShare
from common.contracts.errors import DeadlineExceeded, Overloaded, QuireError, QuotaViolation
from common.contracts.limits import MAX_ADAPTER_LOADS
from router.workers.client import WorkerClient

# Pauses between two attempts while all adapters in a worker's memory are in use.
_PAUSE_S: Final = 0.05
# The longest one, where so many loads wait that a router asks each of them more rarely: less than CLAIM_S of a worker.
_LONGEST_PAUSE_S: Final = 1.0
PATIENCE_S: Final = 60.0
"""Seconds that a request waits for an adapter that finds no room."""


@dataclass(slots=True)
class _Load:
    """A load, and for each request that waits for it what ends its wait without it, and when.

    `full` is set once it found no room, and `why` says why not, as the worker last did.
    """

    waiting: dict[asyncio.Future[None], float] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    ended: asyncio.Task[None] | None = None

    def found_no_room(self, refused: Overloaded, now: float, patience: float) -> None:
        """Note the worker's reason, and end the waits that have lasted as long as they may."""
        self.why = refused.violation.description
        self.full.set()
        words = f"{self.why}; the request has waited for {patience:g} s"
        over = type(refused)(QuotaViolation(refused.violation.subject, words), refused.retry_after_s)
        for wait, latest in self.waiting.items():
            if now >= latest and not wait.done():
                wait.set_exception(over)


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
        give_way: Callable[[str], None] = lambda why: None,
        share: AdapterShare = NOBODYS,
    ) -> None:
        """Return once the adapter is in the worker's memory, or the request is interrupted.

        `give_way` is called with the worker's reason where the adapter finds no room: that may last as long as streams
        of other adapters, so the place at the worker is to be free meanwhile. `share` says for whom it is loaded.
        Raises Unavailable where the worker is lost, Overloaded where there is no room for as long as the request
        waits, DeadlineExceeded, and the worker's refusal.
        """
        load = self._running.get((client, wanted)) or self._begin(client, wanted, share)
        assert load.ended is not None
        timeout = None if deadline is None else max(0.0, deadline - self._now())
        left, full = asyncio.create_task(interrupted.wait()), asyncio.create_task(load.full.wait())
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends: tuple[asyncio.Future[Any], ...] = (load.ended, left, refused)
        load.waiting[refused] = self._now() + self._patience
        try:
            async with asyncio.timeout(timeout):
                done, _ = await asyncio.wait((*ends, full), return_when=asyncio.FIRST_COMPLETED)
                if full in done:
                    give_way(load.why)
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline passed while adapter {wanted.name} was loaded") from None
        finally:
            del load.waiting[refused]
            left.cancel()
            full.cancel()
        for end in (refused, load.ended):
            if end in done:
                end.result()
        refused.cancel()

    async def load_at_once(
        self, client: WorkerClient, wanted: AdapterRef, share: AdapterShare, interrupted: asyncio.Event, patience: float
    ) -> str:
        """Return "" once the adapter is in the worker's memory, or why it is not: no wait for room, and none longer."""
        why = "the wait was interrupted"
        over = asyncio.Event()

        def no_room(reason: str) -> None:
            nonlocal why
            why = f"adapter {wanted.name} found no room: {reason}"
            over.set()

        load = asyncio.create_task(self.load(client, wanted, None, over, no_room, share))
        left = asyncio.create_task(interrupted.wait())
        try:
            await asyncio.wait((load, left), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if load.done() and not over.is_set():
                load.result()
                return ""
            return why if over.is_set() or left.done() else f"adapter {wanted.name} took longer than {patience:.1f} s"
        except QuireError as refused:
            return str(refused)
        finally:
            left.cancel()
            over.set()
            load.cancel()

    def _begin(self, client: WorkerClient, wanted: AdapterRef, share: AdapterShare) -> _Load:
        load = self._running[client, wanted] = _Load()
        load.ended = asyncio.create_task(self._load(client, wanted, load, share))
        load.ended.add_done_callback(lambda done: self._ended((client, wanted), load, done))
        return load

    async def _load(self, client: WorkerClient, wanted: AdapterRef, load: _Load, share: AdapterShare) -> None:
        while True:
            try:
                return await client.load_adapter(wanted, share=share)
            except Overloaded as refused:
                load.found_no_room(refused, self._now(), self._patience)
            if load.waiting:
                await asyncio.sleep(self._pause())
            if not load.waiting:  # whoever comes next begins another one
                return self._forget((client, wanted), load)

    def _pause(self) -> float:
        """Return the seconds until a load is tried again: all loads together are tried so often a second at most."""
        return min(_LONGEST_PAUSE_S, _PAUSE_S * max(1.0, len(self._running) / MAX_ADAPTER_LOADS))

    def _ended(self, key: tuple[WorkerClient, AdapterRef], load: _Load, done: asyncio.Task[None]) -> None:
        self._forget(key, load)
        if not done.cancelled():
            done.exception()  # whoever waited may have left

    def _forget(self, key: tuple[WorkerClient, AdapterRef], load: _Load) -> None:
        if self._running.get(key) is load:
            del self._running[key]
