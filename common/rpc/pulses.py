"""Sends pulses on a stream, and waits for the silence of its other end (`common/rpc/silence.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from common.contracts.clock import until_tick
from common.rpc.silence import Silence, pulse_seconds


async def send_pulses(limit: float, send: Callable[[], None]) -> None:
    """Send pulses for the other end's bound on silence until this task is cancelled; none where there is no bound."""
    every = pulse_seconds(limit)
    while every is not None:
        send()
        await asyncio.sleep(until_tick(time.monotonic(), every))


class SilenceWatch:
    """Watches one stream from `begin` on. The event loop calls all methods."""

    def __init__(self, limit: float) -> None:
        self.limit, self._silence = limit, Silence(limit, 0.0)
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Watch from now on: the other end is known to send pulses. Idempotent."""
        if not self._begun.is_set():
            self._silence = Silence(self.limit, self._now())
            self._begun.set()

    def heard(self) -> None:
        self._silence.heard(self._now())

    async def over(self) -> None:
        """Return when nothing was heard for longer than the limit."""
        await self._begun.wait()
        while not self._silence.over(self._now()):  # noqa: ASYNC110 - it ends with time
            await asyncio.sleep(until_tick(self._now(), self._silence.every))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
