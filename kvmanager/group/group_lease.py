"""The lease of a group of managers in Redis: one Lua call for each attempt."""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.limits import MAX_FOREIGN_EPOCH
from kvmanager.group.leadership import Attempt, Lease
from kvmanager.index import scripts
from kvmanager.index.store import unavailable


class RedisGroupLease:
    """The lease of one group, for one owner. `clock` returns seconds since 1970: terms begin there."""

    def __init__(
        self,
        redis: Redis,
        group: str,
        owner: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis, self._owner, self._clock = redis, owner, clock
        self.group, self._renewals = group, 0
        self._keys = index_format.group_keys(group)
        self._hold = redis.register_script(scripts.HOLD)
        self._resign = redis.register_script(scripts.RESIGN)

    async def hold(self, attempt: Attempt, address: str, namespace: str) -> int | Lease:
        """Take or renew the lease; return the own term, or the lease of another owner. Raises IndexUnavailable."""
        self._renewals += 1  # also for one that fails: Redis may have carried it out
        seize = "" if attempt.seize is None else " ".join(map(str, attempt.seize))
        begin = min(int(self._clock()), MAX_FOREIGN_EPOCH)  # others take no higher number for a term
        own: list[str | int] = [self._owner, attempt.term, attempt.least, seize, begin]
        with unavailable():
            mine, term, *rest = await self._hold(keys=self._keys, args=[*own, address, namespace, self._renewals])
        if mine:
            return int(term)
        owner, held_by, index = (part.decode(errors="replace") for part in rest[1:])
        return Lease(int(term), owner, held_by, index, int(rest[0]))

    async def resign(self) -> None:
        """Give the lease up, if this owner holds it. Raises IndexUnavailable."""
        with unavailable():
            await self._resign(keys=self._keys[:1], args=[self._owner])

    async def close(self) -> None:
        await self._redis.aclose()
