"""How the routers of a replay tell each other of their load: the stream in Redis, with what may go wrong on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from common.contracts.clock import Clock
from router.placement.shared_load import Notice, SharedLoad


@dataclass(frozen=True, slots=True)
class Sharing:
    """How often a router asks Redis, and the time of a message one way, in seconds; shares of notices that go wrong.

    A late notice comes `late_s` later, so that others overtake it.
    """

    every_s: float = 0.01
    message_s: float = 0.0005
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 0.05


class NoticeStream:
    """All notices in the order in which they came, and how far each router has read."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, sharing: Sharing, routers: Sequence[SharedLoad], seed: int
    ) -> None:
        self._loop, self._clock, self._sharing, self._routers = loop, clock, sharing, routers
        self._rng, self._notices, self._read = random.Random(seed), list[Notice](), [0] * len(routers)
        for number in range(len(routers)):
            loop.call_later(sharing.every_s * number / len(routers), self._exchange, number)

    def _exchange(self, number: int) -> None:
        """Tell and hear in one call to Redis, as a router does; again after a while."""
        notice, way = self._routers[number].tell(self._clock.monotonic()), self._sharing.message_s
        if notice is not None:
            for delay in self._delays():
                self._loop.call_later(way + delay, self._notices.append, notice)
        self._loop.call_later(way, self._answer, number)
        self._loop.call_later(self._sharing.every_s, self._exchange, number)

    def _delays(self) -> list[float]:
        """Return the delay of each copy of a notice that comes."""
        rng, sharing = self._rng, self._sharing
        if rng.random() < sharing.lost:
            return []
        return [
            sharing.late_s if rng.random() < sharing.late else 0.0 for _ in range(1 + (rng.random() < sharing.doubled))
        ]

    def _answer(self, number: int) -> None:
        found, self._read[number] = self._notices[self._read[number] :], len(self._notices)
        self._loop.call_later(self._sharing.message_s, self._hear, number, found)

    def _hear(self, number: int, notices: Sequence[Notice]) -> None:
        router, now = self._routers[number], self._clock.monotonic()
        for each in notices:
            router.hear(each, now)
        router.expire(now)
