"""Tries suspected requests again (`workers/suspicion.py`): those without a token first, and one at a time.

Requests that are lost together would be suspected together again if they went to the next worker together. In its
turn a suspected request runs without the others: a break then blames it, and new tokens clear it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

from common.contracts.limits import MAX_STRIKES
from router.workers.suspicion import Breakdown, Suspicion

# Seconds after which the next suspected request may go, while this one waits, computes a long prompt or gets nowhere.
TURN_SECONDS: Final = 5.0
# Seconds that a request with tokens waits for those of its break that have none.
HOLD_SECONDS: Final = 1.0
# Seconds that a worker has to show that it lives after its connection broke: a few attempts to connect.
VERDICT_SECONDS: Final = 5.0
# Seconds that a suspected request waits for its turn; then it goes with the others, bounded only by the limit of moves.
MAX_WAIT_SECONDS: Final = 10.0


class Turn:
    """The turn of one suspected request; `end` is idempotent."""

    def __init__(self, lock: asyncio.Lock, seconds: float) -> None:
        self._lock = lock
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)
        self.ended = False

    def end(self) -> None:
        """Let the next suspected request go: this one is cleared, ended, or was lost again."""
        self._timer.cancel()
        if not self.ended:
            self.ended = True
            self._lock.release()


class Probation:
    """The queue of one router's suspected requests."""

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self._lock, self._seconds = asyncio.Lock(), seconds

    async def wait(self, suspicion: Suspicion, interrupted: asyncio.Event) -> Turn | None:
        """Wait until a suspected request may be tried; return its turn, which the caller ends, where it needs one.

        A request that is interrupted meanwhile waits no longer, and gets no turn.
        """
        if (breakdown := suspicion.waits_for) is not None:
            seconds = HOLD_SECONDS if suspicion.breaks < MAX_STRIKES else self._seconds
            await self._hold(breakdown, seconds, interrupted)
        return await self._turn(interrupted) if suspicion.apart and not interrupted.is_set() else None

    async def is_blamed(self, suspicion: Suspicion, interrupted: asyncio.Event) -> bool:
        """Return whether a request that has just lost a worker broke its workers itself.

        Before that is said, the workers may show that they live. One that does not show it in time has ended. A request
        that is interrupted meanwhile gets no verdict: False.
        """
        async with _at_most(VERDICT_SECONDS, interrupted):
            while suspicion.is_blamed and (unsettled := suspicion.unsettled):
                settled = asyncio.Event()
                unsettled[0].when_settled(settled.set)
                await settled.wait()
        return suspicion.is_blamed and not interrupted.is_set()

    async def _hold(self, breakdown: Breakdown, seconds: float, interrupted: asyncio.Event) -> None:
        clear = asyncio.Event()
        breakdown.when_no_first(clear.set)
        async with _at_most(seconds, interrupted):
            await clear.wait()

    async def _turn(self, interrupted: asyncio.Event) -> Turn | None:
        acquired = False
        async with _at_most(MAX_WAIT_SECONDS, interrupted):
            acquired = await self._lock.acquire()
        return Turn(self._lock, self._seconds) if acquired else None


@asynccontextmanager
async def _at_most(seconds: float, interrupted: asyncio.Event) -> AsyncGenerator[None, None]:
    """End what waits inside after so many seconds, or when the request is interrupted, without an error."""
    loop, watch = asyncio.get_running_loop(), asyncio.ensure_future(interrupted.wait())
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds) as limit:
            inside = True

            def end(_: object) -> None:
                if inside:
                    limit.reschedule(loop.time())

            watch.add_done_callback(end)
            try:
                yield
            finally:
                inside = False
                watch.cancel()
