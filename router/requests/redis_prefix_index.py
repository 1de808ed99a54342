"""The prefix index in Redis, as the router reads it: how many leading blocks of a prompt each worker has cached.

The router reads many keys by one script: redis-py costs some ten microseconds a command, so a pipeline of GETs costs
ten times as much. The script cuts each value where it no longer counts; MGET would bring whatever somebody wrote into
Redis. The router reads growing windows of block hashes and stops at the first window with a hole. Where
layers keep K/V of windows or chunks, it reads a few blocks and then those around hits. At its limit a lookup ends with
the hits that are known by then. A Redis that keeps failing is skipped: a missing answer costs hits, never a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.backoff import Backoff
from common.contracts.clock import Clock
from common.contracts.index_format import (
    OWNER_FIELDS,
    SlotOwner,
    owner_from_values,
    prefix_key_root,
    slot_key,
    unpack_entries,
)
from common.contracts.limits import MAX_INDEX_OWNER_BYTES, MAX_INDEX_VALUE_BYTES
from common.contracts.types import BlockHash, PoolIdentity
from router.contracts.index_answer import IndexAnswer, IndexSaid
from router.contracts.ports import KnownPool
from router.observe.diagnosis.words import duration
from router.placement.breaker import CircuitBreaker
from router.placement.prefix_holders import PrefixHolders, windows
from router.placement.run_rule import RunRule, rule_of
from router.placement.run_search import RunSearch

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
        pool: KnownPool,
        clock: Clock,
        timeout: float,
        breaker: CircuitBreaker | None = None,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """Without a known model of the `pool` there is no lookup.

        `timeout` is the limit of a lookup in seconds. `count` gets each lookup's outcome: answered, cut at the limit,
        failed, or skipped after many failures.
        """
        self._redis, self._pool, self._clock, self._timeout = redis, pool, clock, timeout
        self._breaker, self._count = breaker or CircuitBreaker(PAUSES.pause), count
        self._owners: dict[int, SlotOwner] = {}
        self._looked: dict[int, float] = {}
        self._namespace = ""
        self._rule: RunRule | None = None
        # Whether the index has named a worker.
        self._named_workers = False
        self._failing_since, self._last_failure = 0.0, ""

    @property
    def connected(self) -> bool:
        return self._breaker.healthy

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> IndexAnswer:
        """Return hit blocks by worker id; no hits when Redis does not answer, or the index has no worker."""
        identity, began = self._pool.identity, self._clock.monotonic()
        if not identity.model_fingerprint:
            return IndexAnswer(None, IndexSaid.OFF)
        if not self._breaker.allows(began):
            self._count("skipped")
            return IndexAnswer(None, IndexSaid.SKIPPED, self._failures_words(began))
        root = prefix_key_root(identity.namespace)
        lookup = _Lookup(self._redis, self._clock, self._timeout, root)
        try:
            hits = await self._lookup(lookup, identity, block_hashes)
        except (RedisError, OSError, TimeoutError) as error:
            return self._failed(error, began)
        if not self._breaker.healthy:
            log.info("the prefix index answers again")
        self._breaker.succeeded()
        self._count("cut" if lookup.cut else "answered")
        return self._answer(hits, lookup.cut, began)

    def _answer(self, hits: Mapping[str, int], cut: bool, began: float) -> IndexAnswer:
        seconds, known = self._seconds_since(began), self._named_workers
        self._named_workers = known or bool(self._owners)
        if cut:
            return IndexAnswer(hits if self._owners else None, IndexSaid.CUT, duration(self._timeout), seconds)
        if not self._owners:
            return IndexAnswer(None, IndexSaid.LOST if known else IndexSaid.EMPTY, "", seconds)
        return IndexAnswer(hits, IndexSaid.ANSWERED, "", seconds)

    def _failed(self, error: Exception, began: float) -> IndexAnswer:
        """Count a look-up that had no answer. A record has the kind of the failure, the log its words."""
        now = self._clock.monotonic()
        if self._breaker.healthy:
            log.warning("the prefix index does not answer", extra={"reason": str(error) or "timeout"})
            self._failing_since = now
        self._breaker.failed(now)
        self._count("failed")
        late = isinstance(error, TimeoutError | RedisTimeoutError)
        limit = duration(self._timeout)
        self._last_failure = f"no answer within {limit}" if late else _kind_of(error)
        said, detail = (IndexSaid.LATE, limit) if late else (IndexSaid.FAILED, self._last_failure)
        return IndexAnswer(None, said, detail, self._seconds_since(began))

    def _failures_words(self, now: float) -> str:
        failed = (
            f"{self._breaker.failures} look-ups in a row failed in the {duration(now - self._failing_since)} before"
        )
        return f"{failed}, the last one: {self._last_failure}"

    def _seconds_since(self, began: float) -> float:
        return min(self._clock.monotonic() - began, self._timeout)

    async def _lookup(
        self, lookup: _Lookup, identity: PoolIdentity, block_hashes: Sequence[BlockHash]
    ) -> Mapping[str, int]:
        namespace = identity.namespace
        if namespace != self._namespace:
            self._namespace, self._owners, self._looked, self._named_workers = namespace, {}, {}, False
            self._rule = rule_of(identity.kv_geometry, identity.block_size)
        await self._look_up_owners(lookup, self._older_than(OWNER_SECONDS, self._owners))
        if self._rule is not None:
            return await self._search(lookup, self._rule, block_hashes)
        match = await self._match(lookup, block_hashes)
        if await self._look_up_owners(lookup, self._older_than(DEAD_SECONDS, match.unknown)):
            match = await self._match(lookup, block_hashes)
        return match.hits()

    def _older_than(self, seconds: float, slots: Iterable[int]) -> list[int]:
        """Return the slots whose owner was last read at least so many seconds ago."""
        oldest = self._clock.monotonic() - seconds
        return sorted(slot for slot in slots if self._looked.get(slot, float("-inf")) <= oldest)

    def _live(self) -> dict[int, tuple[str, int]]:
        return {slot: (owner.worker_id, owner.generation) for slot, owner in self._owners.items()}

    async def _match(self, lookup: _Lookup, block_hashes: Sequence[BlockHash]) -> PrefixHolders:
        match = PrefixHolders(self._live(), unpack_entries)
        for window in windows(len(block_hashes)):
            values = await lookup.read([block_hashes[place] for place in window])
            if values is None or not match.feed(values):
                break
        return match

    async def _search(self, lookup: _Lookup, rule: RunRule, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Look for runs of blocks. The first blocks name every worker that has one, so new owners are read then."""
        search, is_first = RunSearch(self._live(), unpack_entries, rule, len(block_hashes)), True
        while places := search.wanted():
            values = await lookup.read([block_hashes[place] for place in places])
            if values is None:
                break
            search.feed(values)
            if is_first and search.probed:
                is_first = False
                if await self._look_up_owners(lookup, self._older_than(DEAD_SECONDS, search.unknown)):
                    search = RunSearch(self._live(), unpack_entries, rule, len(block_hashes))
        return search.hits()

    async def _look_up_owners(self, lookup: _Lookup, slots: Sequence[int]) -> bool:
        """Read the owners of these slots, drop those that are gone; return whether anything changed."""
        if not slots:
            return False
        answers = await lookup.run(_OWNERS, [slot_key(self._namespace, slot) for slot in slots], *OWNER_FIELDS)
        if answers is None:
            return False
        before, now = dict(self._owners), self._clock.monotonic()
        for slot, fields in zip(slots, answers, strict=True):
            self._looked[slot] = now
            if owner := owner_from_values(fields) if fields else None:
                self._owners[slot] = owner
            else:
                self._owners.pop(slot, None)
        return self._owners != before


class _Lookup:
    """What one lookup asks Redis, up to its limit. `cut` says that the limit came after some answers."""

    def __init__(self, redis: Redis, clock: Clock, timeout: float, root: bytes) -> None:
        self._redis, self._clock, self._end, self._root = redis, clock, clock.monotonic() + timeout, root
        self._answered = self.cut = False
        self._values: dict[BlockHash, bytes] = {}

    async def read(self, block_hashes: Sequence[BlockHash]) -> list[bytes] | None:
        """Return the values of blocks; None at the limit. A block that was read before is not asked for again."""
        values = self._values
        if asked := [each for each in block_hashes if each not in values]:
            answers = await self.run(_BEGINNINGS, [self._root + each for each in asked])
            if answers is None:
                return None
            values.update(zip(asked, answers, strict=True))
        return [values[each] for each in block_hashes]

    async def run(self, script: str, keys: Sequence[str | bytes], *arguments: str) -> list[Any] | None:
        """Return what a script that only reads returns for each key; Redis keeps it compiled. None: at the limit.

        Raises TimeoutError when not even the first answer comes in time, and RedisError for half an answer. A long
        prompt alone says nothing about Redis. The clock is read before each call, because the `asyncio.wait_for` of
        Python 3.11, by which redis-py sends, may lose a timeout.
        """
        left = self._end - self._clock.monotonic()
        if self._answered and left <= 0:
            self.cut = True
            return None
        try:
            async with asyncio.timeout(left):
                answers = await cast("Awaitable[list[Any]]", self._redis.eval_ro(script, len(keys), *keys, *arguments))
        except (TimeoutError, RedisTimeoutError):
            if not self._answered:
                raise
            self.cut = True
            return None
        if len(answers) != len(keys):
            raise ResponseError(f"{len(answers)} answers for {len(keys)} keys")
        self._answered = True
        return answers


def _kind_of(error: Exception) -> str:
    if isinstance(error, RedisConnectionError | OSError):
        return "it could not be reached"
    return "it answered with an error"


class NoPrefixIndex:
    """The PrefixIndex when no Redis is configured."""

    connected = False

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> IndexAnswer:
        return IndexAnswer(None, IndexSaid.OFF)
