"""Keeps responses and conversations, which clients read and continue: in Redis, or in this process where there is none.

Each tenant has entries of its own. Bytes and entries are bounded, of a tenant and of all: the oldest entry of the
tenant makes room for its next one, and the oldest of the largest tenant where all have too many.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.backoff import Backoff
from common.contracts import limits
from common.contracts.clock import Clock
from common.contracts.errors import Unavailable
from router.placement.breaker import CircuitBreaker

log = logging.getLogger(__name__)

_ROOT: Final = "quire-responses:"
_PAUSES: Final = Backoff(first=1.0, longest=10.0)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Seconds that an entry lives, and how many entries and bytes there are at most."""

    seconds: float = 86_400.0
    entries: int = limits.MAX_RESPONSES
    total_bytes: int = limits.MAX_RESPONSES_BYTES
    entries_of_tenant: int = limits.MAX_RESPONSES_A_TENANT
    bytes_of_tenant: int = limits.MAX_RESPONSES_BYTES_A_TENANT


class ResponseStore(Protocol):
    # Whether other routers have the same entries.
    is_shared: bool

    async def put(self, tenant: str, name: str, entry: bytes) -> None:
        """Keep an entry in place of an older one of that name. A store that does not answer loses it."""
        ...

    async def replace(self, tenant: str, name: str, entry: bytes, old: bytes | None) -> bool:
        """Keep an entry if the one there is `old`, or there is none for None; return whether. Raises Unavailable."""
        ...

    async def get(self, tenant: str, name: str) -> bytes | None:
        """Return an entry of the tenant. Raises Unavailable."""
        ...

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget an entry; return whether there was one. Raises Unavailable."""
        ...


@dataclass(slots=True)
class _Kept:
    """The entries of one tenant in memory, the oldest first, each with the time of its end."""

    entries: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)
    size: int = 0


class MemoryStore:
    """The store of a router without Redis."""

    is_shared = False

    def __init__(self, bounds: StoreLimits, clock: Clock) -> None:
        self._bounds, self._clock = bounds, clock
        self._tenants: dict[str, _Kept] = {}
        self.size = self.count = 0

    async def put(self, tenant: str, name: str, entry: bytes) -> None:
        now = self._clock.monotonic()
        self._drop_expired(now)
        self._forget(tenant, name)
        kept = self._tenants.setdefault(tenant, _Kept())
        kept.entries[name] = (now + self._bounds.seconds, entry)
        self._count(kept, 1, len(entry))
        bounds = self._bounds
        while len(kept.entries) > bounds.entries_of_tenant or kept.size > bounds.bytes_of_tenant:
            self._forget_oldest(tenant)
        while self.count > bounds.entries or self.size > bounds.total_bytes:
            self._forget_oldest(max(self._tenants, key=lambda each: self._tenants[each].size))

    async def replace(self, tenant: str, name: str, entry: bytes, old: bytes | None) -> bool:
        # Nothing in here waits, so no other writer comes between.
        if await self.get(tenant, name) != old:
            return False
        await self.put(tenant, name, entry)
        return True

    async def get(self, tenant: str, name: str) -> bytes | None:
        kept = self._tenants.get(tenant)
        ends, entry = kept.entries.get(name, (0.0, b"")) if kept else (0.0, b"")
        return entry if ends > self._clock.monotonic() else None

    async def delete(self, tenant: str, name: str) -> bool:
        found = await self.get(tenant, name) is not None
        self._forget(tenant, name)
        return found

    def _drop_expired(self, now: float) -> None:
        for tenant, kept in [*self._tenants.items()]:
            while kept.entries and next(iter(kept.entries.values()))[0] <= now:
                self._forget_oldest(tenant)

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._tenants[tenant].entries)))

    def _forget(self, tenant: str, name: str) -> None:
        kept = self._tenants.get(tenant)
        if kept is None or name not in kept.entries:
            return
        _, entry = kept.entries.pop(name)
        self._count(kept, -1, -len(entry))
        if not kept.entries:
            del self._tenants[tenant]

    def _count(self, kept: _Kept, entries: int, size: int) -> None:
        kept.size += size
        self.size += size
        self.count += entries


# Beside the entries there are: the times at which they end, of all (`ends`) and of each tenant (`of:TENANT`), the size
# of each (`sizes`), and the bytes of each tenant (`held`) and of all (`total`). The commands of one script are atomic.
_FORGET: Final = """
local root = KEYS[1]
local ends, sizes, held, total = root .. 'ends', root .. 'sizes', root .. 'held', root .. 'total'
local function forget(tenant, name)
  local member = tenant .. ':' .. name
  local size = tonumber(redis.call('HGET', sizes, member) or 0)
  local found = redis.call('DEL', root .. 'entry:' .. member)
  redis.call('ZREM', ends, member)
  redis.call('ZREM', root .. 'of:' .. tenant, name)
  redis.call('HDEL', sizes, member)
  redis.call('DECRBY', total, size)
  if tonumber(redis.call('ZINCRBY', held, -size, tenant)) <= 0 then redis.call('ZREM', held, tenant) end
  return found
end
"""
_DELETE: Final = f"{_FORGET} return forget(ARGV[1], ARGV[2])"
_PUT: Final = f"""{_FORGET}
local tenant, name, entry, milliseconds = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function number(reply) return tonumber(reply or 0) end
local expected = ARGV[9]
if expected ~= 'any' then
  local present = redis.call('GET', root .. 'entry:' .. tenant .. ':' .. name)
  if (present and redis.sha1hex(present) or 'none') ~= expected then return 0 end
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 256)) do
  forget(string.match(member, '^(.-):(.*)$'))
end
forget(tenant, name)
local member, mine = tenant .. ':' .. name, root .. 'of:' .. tenant
redis.call('SET', root .. 'entry:' .. member, entry, 'PX', milliseconds)
redis.call('ZADD', ends, now + milliseconds, member)
redis.call('ZADD', mine, now + milliseconds, name)
redis.call('HSET', sizes, member, #entry)
redis.call('ZINCRBY', held, #entry, tenant)
redis.call('INCRBY', total, #entry)
local function forget_oldest(of)
  local oldest = redis.call('ZRANGE', root .. 'of:' .. of, 0, 0)[1]
  if oldest == nil then return false end
  forget(of, oldest)
  return true
end
while redis.call('ZCARD', mine) > tonumber(ARGV[5]) or number(redis.call('ZSCORE', held, tenant)) > tonumber(ARGV[6]) do
  if not forget_oldest(tenant) then break end
end
while redis.call('ZCARD', ends) > tonumber(ARGV[7]) or number(redis.call('GET', total)) > tonumber(ARGV[8]) do
  local largest = redis.call('ZREVRANGE', held, 0, 0)[1]
  if largest == nil or not forget_oldest(largest) then break end
end
return 1
"""


class NoStore:
    """The store where the operator wants none: nothing is kept."""

    is_shared = False

    async def put(self, tenant: str, name: str, entry: bytes) -> None:
        return

    async def replace(self, tenant: str, name: str, entry: bytes, old: bytes | None) -> bool:
        return False

    async def get(self, tenant: str, name: str) -> bytes | None:
        return None

    async def delete(self, tenant: str, name: str) -> bool:
        return False


class RedisStore:
    """The store that all routers of a pool share. A Redis that keeps failing is left alone for a while."""

    is_shared = True

    def __init__(self, redis: Redis, bounds: StoreLimits, clock: Clock, root: str = _ROOT) -> None:
        self._redis, self._bounds, self._clock, self._root = redis, bounds, clock, root
        self._breaker = CircuitBreaker(_PAUSES.pause)

    async def put(self, tenant: str, name: str, entry: bytes) -> None:
        try:
            await self._write(tenant, name, entry, "any")
        except Unavailable as error:
            log.warning("a response is not kept", extra={"reason": str(error)})

    async def replace(self, tenant: str, name: str, entry: bytes, old: bytes | None) -> bool:
        expected = "none" if old is None else hashlib.sha1(old, usedforsecurity=False).hexdigest()
        return await self._write(tenant, name, entry, expected)

    async def get(self, tenant: str, name: str) -> bytes | None:
        key = f"{self._root}entry:{_digest(tenant)}:{name}"
        # One byte more than an entry has at most: whatever somebody wrote there is not read as a whole.
        found = await self._answered(lambda: self._redis.getrange(key, 0, limits.MAX_RESPONSE_BYTES))
        return found if found and len(found) <= limits.MAX_RESPONSE_BYTES else None

    async def delete(self, tenant: str, name: str) -> bool:
        return bool(await self._answered(lambda: self._redis.eval(_DELETE, 1, self._root, _digest(tenant), name)))

    async def _write(self, tenant: str, name: str, entry: bytes, expected: str) -> bool:
        """Keep an entry in place of the expected one: `any`, `none`, or the one with this SHA-1. Raises Unavailable."""
        bounds = self._bounds
        most = (bounds.entries_of_tenant, bounds.bytes_of_tenant, bounds.entries, bounds.total_bytes)
        arguments = (_digest(tenant), name, entry, round(1000 * bounds.seconds), *most, expected)
        return bool(await self._answered(lambda: self._redis.eval(_PUT, 1, self._root, *arguments)))

    async def _answered(self, ask: Callable[[], Any]) -> Any:
        """Return Redis's answer. Raises Unavailable when there is none."""
        if not self._breaker.allows(self._clock.monotonic()):
            raise Unavailable("the store of responses does not answer; try again")
        try:
            answer = await cast("Awaitable[Any]", ask())
        except (RedisError, OSError, TimeoutError) as error:
            self._breaker.failed(self._clock.monotonic())
            raise Unavailable(f"the store of responses does not answer: {type(error).__name__}; try again") from None
        self._breaker.succeeded()
        return answer


def _digest(tenant: str) -> str:
    """Return a tenant's part of keys: names may have any character."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
