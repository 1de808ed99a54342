"""The prefix index in Redis, as the router reads it: how many leading blocks of a prompt each worker has cached.

The router reads many keys by one script: redis-py costs some ten microseconds a command, so a pipeline of GETs costs
ten times as much. The script cuts each value where it no longer counts; MGET would bring whatever somebody wrote into
Redis. The router reads growing windows of block hashes and stops at the first window with a hole, unless every layer of
the model has an attention window. A lookup that takes
too long is given up, and a Redis that keeps failing is skipped: a missing answer costs hits, never a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.backoff import Backoff
from common.clock import Clock
from common.index_format import OWNER_FIELDS, SlotOwner, owner_from_values, prefix_key_root, slot_key, unpack_entries
from common.limits import MAX_INDEX_OWNER_BYTES, MAX_INDEX_VALUE_BYTES
from common.types import BlockHash, PoolIdentity
from router.core.breaker import CircuitBreaker
from router.core.prefix_match import PrefixMatch, RunMatch, windows

log = logging.getLogger(__name__)

# How long lookups are skipped after several failures in a row.
PAUSES = Backoff(first=1.0, longest=10.0)
# Seconds for which the owner of a slot is cached; old entries of a rebuilt worker count for as long at most.
OWNER_SECONDS = 1.0
# Seconds for which a slot is cached as ownerless or of another generation; entries of lost workers are common.
DEAD_SECONDS = 0.2

# Returns the beginning of each key's string; "" for one that is missing or of another type.
_BEGINNINGS: Final = f"""
local found = {{}}
for place, key in ipairs(KEYS) do
  local value = redis.pcall('GETRANGE', key, 0, {MAX_INDEX_VALUE_BYTES - 1})
  found[place] = type(value) == 'string' and value or ''
end
return found
"""
# Returns the fields ARGV of each key's hash; none of a hash that has a field of too many bytes, or of another type.
_OWNERS: Final = f"""
local function fields(key)
  for _, name in ipairs(ARGV) do
    local bytes = redis.pcall('HSTRLEN', key, name)
    if type(bytes) ~= 'number' or bytes > {MAX_INDEX_OWNER_BYTES} then return {{}} end
  end
  return redis.call('HMGET', key, unpack(ARGV))
end
local found = {{}}
for place, key in ipairs(KEYS) do found[place] = fields(key) end
return found
"""


class RedisPrefixIndex:
    """The PrefixIndex over a Redis client."""

    def __init__(
        self,
        redis: Redis,
        identity: Callable[[], PoolIdentity],
        clock: Clock,
        timeout: float,
        breaker: CircuitBreaker | None = None,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """`identity` returns the known parts of the pool's identity; without a model there is no lookup.

        `timeout` is in seconds. `count` gets each lookup's outcome: answered, failed, or skipped after many failures.
        """
        self._redis, self._identity, self._clock, self._timeout = redis, identity, clock, timeout
        self._breaker, self._count = breaker or CircuitBreaker(PAUSES.pause), count
        self._owners: dict[int, SlotOwner] = {}
        self._looked: dict[int, float] = {}
        self._namespace = ""

    @property
    def connected(self) -> bool:
        return self._breaker.healthy

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int] | None:
        """Return hit blocks by worker id; None when Redis does not answer, or the index has no worker."""
        identity = self._identity()
        if not identity.model_fingerprint:
            return None
        if not self._breaker.allows(self._clock.monotonic()):
            self._count("skipped")
            return None
        try:
            async with asyncio.timeout(self._timeout):
                hits = await self._lookup(identity, block_hashes)
        except (RedisError, OSError, TimeoutError) as error:
            if self._breaker.healthy:
                log.warning("the prefix index does not answer", extra={"reason": str(error) or "timeout"})
            self._breaker.failed(self._clock.monotonic())
            self._count("failed")
            return None
        if not self._breaker.healthy:
            log.info("the prefix index answers again")
        self._breaker.succeeded()
        self._count("answered")
        return hits if self._owners else None

    async def _lookup(self, identity: PoolIdentity, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        namespace = identity.namespace
        if namespace != self._namespace:
            self._namespace, self._owners, self._looked = namespace, {}, {}
        await self._look_up_owners(self._older_than(OWNER_SECONDS, self._owners))
        until = self._clock.monotonic() + self._timeout
        match = await self._match(identity, block_hashes, until)
        if await self._look_up_owners(self._older_than(DEAD_SECONDS, match.unknown)):
            match = await self._match(identity, block_hashes, until)
        return match.hits()

    def _older_than(self, seconds: float, slots: Iterable[int]) -> list[int]:
        """Return the slots whose owner was last read at least so many seconds ago."""
        oldest = self._clock.monotonic() - seconds
        return sorted(slot for slot in slots if self._looked.get(slot, float("-inf")) <= oldest)

    async def _match(
        self, identity: PoolIdentity, block_hashes: Sequence[BlockHash], until: float
    ) -> PrefixMatch | RunMatch:
        """Read the index up to the end of the hits, or as far as the time allows.

        The clock is read between two answers: asyncio.wait_for of Python 3.11, by which redis-py sends, may lose the
        cancellation of a timeout. What is known by then counts, and is no failure of Redis.
        """
        root, length, seen = prefix_key_root(self._namespace), len(block_hashes), identity.kv_geometry.window
        live = {slot: (owner.worker_id, owner.generation) for slot, owner in self._owners.items()}
        match: PrefixMatch | RunMatch = PrefixMatch(live, unpack_entries)
        if seen:
            match = RunMatch(live, unpack_entries, seen, identity.block_size, length)
        for window in windows(length):
            keys = [root + block_hashes[place] for place in window]
            if not match.feed(cast("list[bytes]", await self._run(_BEGINNINGS, keys))):
                break
            if self._clock.monotonic() >= until:
                break
        return match

    async def _look_up_owners(self, slots: Sequence[int]) -> bool:
        """Read the owners of these slots, drop those that are gone; return whether anything changed."""
        if not slots:
            return False
        answers = await self._run(_OWNERS, [slot_key(self._namespace, slot) for slot in slots], *OWNER_FIELDS)
        before, now = dict(self._owners), self._clock.monotonic()
        for slot, fields in zip(slots, answers, strict=True):
            self._looked[slot] = now
            if owner := owner_from_values(fields) if fields else None:
                self._owners[slot] = owner
            else:
                self._owners.pop(slot, None)
        return self._owners != before

    async def _run(self, script: str, keys: Sequence[str | bytes], *arguments: str) -> list[Any]:
        """Return what a script that only reads returns; Redis keeps it compiled."""
        answer = await cast("Awaitable[object]", self._redis.eval_ro(script, len(keys), *keys, *arguments))
        return cast("list[Any]", answer)


class NoPrefixIndex:
    """The PrefixIndex when no Redis is configured."""

    connected = False

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int] | None:
        return None
