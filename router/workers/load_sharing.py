"""The stream in Redis through which the routers of a pool tell each other of their load at the workers.

One script tells and hears: a call costs this process some 0.1 ms, whatever is in it. A notice that is lost does no
lasting harm (`router/placement/shared_load.py`), so nothing is confirmed or sent again: the stream keeps some thousand
notices, and a router reads those of the last seconds. What Redis holds is not trusted: each answer is bounded, and a
notice that is malformed, or not signed with the pool's key, is passed over. Without Redis, heartbeats alone show what
others placed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.backoff import Backoff
from common.contracts.clock import Clock, until_tick
from router.contracts.identity import is_complete
from router.contracts.ports import KnownPool
from router.placement.breaker import CircuitBreaker
from router.placement.shared_load import FORGET_S, MAX_NOTICE_BYTES, SharedLoad, pack_notice, unpack_notice

log = logging.getLogger(__name__)

# Seconds between two calls: while routers have news, while they have none, and while no other router is heard. A router
# that is quiet, or alone, calls at once when it places something.
EXCHANGE_S = 0.01
QUIET_S = 0.5
ALONE_S = 1.0
# Where Redis is slow: between an answer and the next call.
_LEAST_PAUSE_S: Final = 0.001
# Bytes of notices that are taken at once: other work of the event loop goes between.
_AT_ONCE_BYTES: Final = 1 << 16
# Times what an answer took to be heard, none is asked for: whoever floods the stream gets a part of this process alone.
_REST: Final = 4
# Seconds without news until a router is quiet.
_NEWS_S: Final = 1.0
_TIMEOUT_S: Final = 1.0
_PAUSES: Final = Backoff(first=1.0, longest=10.0)
# Notices that the stream keeps, that an answer has, and the bytes after which an answer ends.
_KEPT: Final = 1000
_READ: Final = 512
_MOST_BYTES: Final = 1 << 20
_KEY_MS: Final = 60_000
_LOG_EVERY_S: Final = 60.0

# Adds the notice ARGV[2], if any, and returns the notices after the id ARGV[1], with the id of the last one. An id that
# is ahead of a notice which was just added is of a stream that is gone: then the last seconds are read again.
_EXCHANGE: Final = f"""
local time = redis.call('TIME')
local oldest = time[1] * 1000 + math.floor(time[2] / 1000) - {int(1000 * FORGET_S)}
local last = ARGV[1]
local read = tonumber(string.match(last, '^%d+')) or 0
if #ARGV[2] > 0 then
  local added = redis.call('XADD', KEYS[1], 'MAXLEN', '~', {_KEPT}, '*', 'n', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], {_KEY_MS})
  if tonumber(string.match(added, '^%d+')) < read then read = 0 end
end
if read < oldest then last = string.format('%.0f-0', oldest) end
local answer, bytes = {{last}}, 0
local found = redis.call('XREAD', 'COUNT', {_READ}, 'STREAMS', KEYS[1], last)
for _, entry in ipairs(found and found[1][2] or {{}}) do
  local value = entry[2][2] or ''
  if #value > {MAX_NOTICE_BYTES} then value = '' end
  answer[1], answer[#answer + 1], bytes = entry[1], value, bytes + #value
  if bytes > {_MOST_BYTES} then break end
end
return answer
"""


def load_key(namespace: str) -> str:
    """Return the key of the stream of a pool's routers."""
    return f"quire-load:{namespace}"


class LoadSharing:
    """Tells the other routers of a pool, and hears them, over a Redis client."""

    def __init__(
        self,
        redis: Redis,
        pool: KnownPool,
        shared: SharedLoad,
        clock: Clock,
        key: bytes | None = None,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """`key` is that of the pool. `count` gets what became of each notice: sent, taken, refused or failed."""
        self._redis, self._pool, self._shared, self._clock = redis, pool, shared, clock
        self._key, self._count = key, count
        self._breaker = CircuitBreaker(_PAUSES.pause)
        self._namespace, self._last = "", b"0-0"
        self._news_at = self._logged_at = float("-inf")
        self._refused = 0
        # Seconds that the last answer took to be heard.
        self._heard_s = 0.0
        self._stirred = asyncio.Event()
        shared.on_change = self._stirred.set

    async def run(self) -> None:
        """Tell and hear until this task is cancelled."""
        while True:
            began = self._clock.monotonic()
            self._stirred.clear()
            await self.exchange()
            if (pause := self.pause()) == EXCHANGE_S:
                least = max(_LEAST_PAUSE_S, _REST * self._heard_s)
                await asyncio.sleep(max(least, began + pause - self._clock.monotonic()))
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick(self._clock.monotonic(), pause)):
                    await self._stirred.wait()
            await asyncio.sleep(EXCHANGE_S)  # what is placed together is told together

    def pause(self) -> float:
        """Return the seconds from one call to the next."""
        if not self._shared.others:
            return ALONE_S
        return EXCHANGE_S if self._clock.monotonic() - self._news_at < _NEWS_S else QUIET_S

    async def exchange(self) -> None:
        """Tell and hear once. Whatever Redis does, what others told before expires in time."""
        self._heard_s = 0.0
        now, identity = self._clock.monotonic(), self._pool.identity
        self._shared.expire(now)
        notice = self._shared.tell(now)
        if not is_complete(identity) or not self._breaker.allows(now):
            return
        if identity.namespace != self._namespace:
            self._namespace, self._last = identity.namespace, b"0-0"
        value = b"" if notice is None else pack_notice(notice, self._key)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                last, *values = await self._call(value)
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error, now)
            return
        if not self._breaker.healthy:
            log.info("routers tell each other of their load again")
        self._breaker.succeeded()
        self._last = last
        if notice is not None:
            self._count("sent")
            self._news_at = now if notice.workers else self._news_at
        await self._hear_all(values)

    async def _call(self, value: bytes) -> list[bytes]:
        key = load_key(self._namespace)
        answer = self._redis.eval(_EXCHANGE, 1, key, self._last, value)
        return await cast("Awaitable[list[Any]]", answer)

    def _failed(self, error: Exception, now: float) -> None:
        if self._breaker.healthy:
            what = "this router hears of other routers' load by heartbeats alone: Redis does not pass it on"
            log.warning(what, extra={"reason": str(error) or "timeout"})
        self._breaker.failed(now)
        self._count("failed")

    async def _hear_all(self, values: list[bytes]) -> None:
        began, since = self._clock.monotonic(), 0
        for value in values:
            if since > _AT_ONCE_BYTES:
                self._heard_s += self._clock.monotonic() - began
                await asyncio.sleep(0)
                began, since = self._clock.monotonic(), 0
            self._hear(value)
            since += len(value)
        self._heard_s += self._clock.monotonic() - began

    def _hear(self, value: bytes) -> None:
        now = self._clock.monotonic()
        try:
            notice = unpack_notice(value, self._key)
        except ValueError as wrong:
            self._refuse(str(wrong), now)
            return
        if self._shared.hear(notice, now):
            self._count("taken")
            self._news_at = now if notice.workers else self._news_at

    def _refuse(self, why: str, now: float) -> None:
        """Count a notice that says nothing, and log such ones, at most once a minute."""
        self._count("refused")
        self._refused += 1
        if now - self._logged_at >= _LOG_EVERY_S:
            what = "notices in %s are passed over: %d since the last such line; the last one: %s"
            log.warning(what, load_key(self._namespace), self._refused, why)
            self._logged_at, self._refused = now, 0
