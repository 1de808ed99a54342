"""Tries suspects again (`core/suspicion.py`): those without a token first, and one at a time.

Requests that are lost together would be suspects together again if they went to the next worker together. With its
turn a suspect is alone among suspects: what breaks under it convicts it, and its tokens clear it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from common.limits import MAX_STRIKES
from router.core.suspicion import Breakdown, Suspicion

# Seconds after which the next suspect may go, while this one waits for blocks, computes a long prompt or gets nowhere.
TURN_SECONDS: Final = 5.0
# Seconds that a request with tokens waits for those of its break that have none.
HOLD_SECONDS: Final = 1.0
# Seconds that a worker has to show that it lives after its connection broke: a few attempts to connect.
VERDICT_SECONDS: Final = 5.0
# Seconds that a suspect waits for its turn; then it goes with the others, and keeps the limit of moves alone.
MAX_WAIT_SECONDS: Final = 10.0


class Turn:
    """The turn of one suspect; `end` is idempotent."""

    def __init__(self, lock: asyncio.Lock, seconds: float) -> None:
        self._lock = lock
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)
        self.ended = False

    def end(self) -> None:
        """Let the next suspect go: this one is cleared, ended, or was lost again."""
        self._timer.cancel()
        if not self.ended:
            self.ended = True
            self._lock.release()


class Probation:
    """The line of suspects of one router."""

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self._lock, self._seconds = asyncio.Lock(), seconds

    async def wait(self, suspicion: Suspicion) -> Turn | None:
        """Wait until a suspect may be tried; return its turn, which the caller ends, where it needs one."""
        if (breakdown := suspicion.waits_for) is not None:
            await self._hold(breakdown, HOLD_SECONDS if suspicion.breaks < MAX_STRIKES else self._seconds)
        return await self._turn() if suspicion.apart else None

    async def is_guilty(self, suspicion: Suspicion, interrupted: asyncio.Event) -> bool:
        """Return whether a request that has just lost a worker broke its workers itself.

        Before that is said, the workers may show that they live. One that does not show it in time has ended. A request
        that is interrupted meanwhile gets no verdict: False.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_SECONDS):
                while suspicion.guilty and (unsettled := suspicion.unsettled) and not interrupted.is_set():
                    settled = asyncio.Event()
                    unsettled[0].when_settled(settled.set)
                    await _first_of(settled, interrupted)
        return suspicion.guilty and not interrupted.is_set()

    async def _hold(self, breakdown: Breakdown, seconds: float) -> None:
        clear = asyncio.Event()
        breakdown.when_no_first(clear.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await clear.wait()

    async def _turn(self) -> Turn | None:
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                await self._lock.acquire()
        except TimeoutError:
            return None
        return Turn(self._lock, self._seconds)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of several events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
