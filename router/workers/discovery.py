"""Finds workers in Redis. Each has a key that its manager renews, and that expires without renewal.

A worker's stream shows that it is alive, not its key. A connected worker stays in use whatever Redis holds, and time in
which Redis cannot be read does not count against a key. What Redis holds is not trusted. The size of each answer is
bounded, and entries that are malformed, unsigned or outside the allowed networks are passed over.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.contracts.clock import Clock, until_tick
from common.contracts.index_format import (
    DISCOVERY_WORKERS_KEY,
    DiscoveredWorker,
    KnownEntry,
    discovered_from_value,
    discovery_key,
    is_fresh,
)
from common.contracts.limits import (
    MAX_DISCOVERED_WORKERS,
    MAX_DISCOVERY_ENTRY_BYTES,
    MAX_DISCOVERY_SET_BYTES,
    MAX_NAMED_ENTRIES,
)
from common.contracts.types import PoolIdentity
from common.process.supervised import Supervisor
from router.contracts.identity import differences
from router.workers.worker_networks import LOOPBACK, WorkerNetworks

log = logging.getLogger(__name__)

_NUMBER: Final = re.compile(r"[+-]?\d+")

POLL_SECONDS = 1.0
_QUOTED_CHARS = 64
# An entry that counted is known for so long after it counted last.
_KNOWN_S = 3_600.0
# Of a list that is longer than what one poll reads, other entries are read each time.
MAX_KNOWN_ENTRIES = 4 * MAX_DISCOVERED_WORKERS


class Members(Protocol):
    """The methods of the worker pool that discovery uses."""

    @property
    def identity(self) -> PoolIdentity: ...

    def add_worker(self, address: str) -> None: ...

    def remove(self, address: str) -> None: ...

    def is_connected(self, address: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class EntryRules:
    """Which entries count: with a key those that are signed with it, and addresses of these networks alone."""

    key: bytes | None = None
    networks: WorkerNetworks = field(default_factory=lambda: WorkerNetworks(LOOPBACK))


@dataclass(slots=True)
class _Found:
    worker: DiscoveredWorker
    seen: float


class Discovery:
    """Adds to a pool the workers that have keys in Redis, and removes them again; leaves configured addresses alone.

    `connected` says whether Redis answers, `problem` what of its answers is passed over ("": nothing).
    """

    def __init__(
        self,
        redis: Redis,
        members: Members,
        clock: Clock,
        lease_seconds: float = 5.0,
        rules: EntryRules = EntryRules(),
    ) -> None:
        """A worker without a connection and without a key is removed after `lease_seconds`."""
        self._redis, self._members, self._clock, self._lease = redis, members, clock, lease_seconds
        self._rules = rules
        self._found: dict[str, _Found] = {}
        # The last entry of each name that counted, and when; those that counted last are at the end.
        self._known: dict[bytes, tuple[KnownEntry, float]] = {}
        # Those of the last poll, so that each is logged once while it lasts.
        self._passed_over: set[str] = set()
        self._refused: dict[str, str] = {}
        self._too_large = ""
        self.connected = False

    @property
    def problem(self) -> str:
        return "; ".join((*filter(None, [self._too_large]), *_named(self._refused)))

    async def run(self) -> None:
        """Poll every second until this task is cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(until_tick(time.monotonic(), POLL_SECONDS))

    async def poll(self) -> None:
        """Poll once. While Redis cannot be read nothing changes."""
        try:
            values = await self._read()
        except (RedisError, OSError) as error:
            if self.connected:
                log.warning("discovery cannot read Redis", extra={"reason": str(error)})
            self.connected = False
            return
        if not self.connected:
            # Redis could not be read for a while: each key gets a whole lease to appear again.
            for found in self._found.values():
                found.seen = self._clock.monotonic()
        self.connected = True
        self._take(self._accepted(values))

    # ------------------------------------------------------------ reading

    async def _read(self) -> dict[bytes, object]:
        """Return at most MAX_DISCOVERED_WORKERS values by worker id; an error of a key stands in place of its value."""
        names = await self._names()
        if not names:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.getrange(discovery_key("").encode() + name, 0, MAX_DISCOVERY_ENTRY_BYTES)
            return dict(zip(names, await pipe.execute(raise_on_error=False), strict=True))

    async def _names(self) -> list[bytes]:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.scard(DISCOVERY_WORKERS_KEY)
            pipe.memory_usage(DISCOVERY_WORKERS_KEY, samples=0)
            count, size = await pipe.execute()
        self._note_size(count, size or 0)
        if (size or 0) > MAX_DISCOVERY_SET_BYTES:
            return []
        drawn = await cast(
            "Awaitable[list[bytes]]", self._redis.srandmember(DISCOVERY_WORKERS_KEY, MAX_DISCOVERED_WORKERS)
        )
        return sorted(drawn)

    def _note_size(self, count: int, size: int) -> None:
        found = ""
        if size > MAX_DISCOVERY_SET_BYTES:
            found = f"{DISCOVERY_WORKERS_KEY} has {size} bytes and is not read; at most {MAX_DISCOVERY_SET_BYTES} are"
        elif count > MAX_DISCOVERED_WORKERS:
            found = f"{DISCOVERY_WORKERS_KEY} has {count} members; {MAX_DISCOVERED_WORKERS} at a time are read"
        if bool(found) != bool(self._too_large):
            log.warning("discovery: %s", found or "the list of workers has a size to be expected again")
        self._too_large = found

    # ------------------------------------------------------------ judging

    def _accepted(self, values: dict[bytes, object]) -> list[DiscoveredWorker]:
        """Return the workers whose entries count; log each other entry once, as long as it stands there."""
        workers, refused = [], {}
        for name, value in values.items():
            if value == b"":
                continue  # expired, or never there
            before, _ = self._known.get(name, (None, 0.0))
            try:
                worker = self._worker(name, value, before)
            except ValueError as error:
                refused[ascii(name.decode(errors="replace")[:_QUOTED_CHARS])] = str(error)
                continue
            self._note_known(name, worker, before)
            if self._says_more(worker, before):
                workers.append(worker)
        self._forget_known()
        if new := {name: why for name, why in refused.items() if _kind(self._refused.get(name, "")) != _kind(why)}:
            log.warning("discovery passes over %d entries: %s", len(new), "; ".join(_named(new)))
        self._refused = refused
        return workers

    def _note_known(self, name: bytes, worker: DiscoveredWorker, before: KnownEntry | None) -> None:
        if self._rules.key is None:
            return  # the dates of entries count for nothing
        now = self._clock.monotonic()
        if before is None or is_fresh(worker, self._now()):
            before = KnownEntry(worker.written, worker.written, now)
        self._known.pop(name, None)
        self._known[name] = before.after(worker), now

    def _forget_known(self) -> None:
        """Keep an entry for a while in which Redis lacks it, or has nonsense in its place, and only so many."""
        oldest = self._clock.monotonic() - _KNOWN_S
        for name, (_, counted) in list(self._known.items()):
            if counted > oldest and len(self._known) <= MAX_KNOWN_ENTRIES:
                return
            del self._known[name]

    def _says_more(self, worker: DiscoveredWorker, before: KnownEntry | None) -> bool:
        """Return whether an entry shows that its worker is attached now: one of an old date must have changed."""
        if self._rules.key is None or before is None or worker.written > before.last:
            return True
        return is_fresh(worker, self._now())

    def _now(self) -> float:
        return self._clock.time_ns() / 1e9

    def _worker(self, name: bytes, value: object, before: KnownEntry | None) -> DiscoveredWorker:
        """Return the worker of an entry. Raises ValueError with what is wrong with it."""
        if not isinstance(value, bytes):
            raise ValueError(f"Redis does not give its value: {str(value)[:_QUOTED_CHARS]}")
        now, monotonic = self._now(), self._clock.monotonic()
        worker = discovered_from_value(value, name.decode(), self._rules.key, now, before, monotonic)
        if refusal := self._rules.networks.refusal(worker.address):
            raise ValueError(refusal)
        return worker

    def _take(self, workers: list[DiscoveredWorker]) -> None:
        now = self._clock.monotonic()
        for worker in self._of_this_pool(workers):
            if worker.address not in self._found:
                log.info("worker %s found", worker.worker_id, extra={"address": worker.address})
            self._found[worker.address] = _Found(worker, now)
            self._members.add_worker(worker.address)
        for address, found in list(self._found.items()):
            if now - found.seen >= self._lease and not self._members.is_connected(address):
                log.info("worker %s is gone", found.worker.worker_id, extra={"address": address})
                del self._found[address]
                self._members.remove(address)

    def _of_this_pool(self, workers: list[DiscoveredWorker]) -> list[DiscoveredWorker]:
        """Return the workers of this pool: pools of other models or block sizes may share one Redis."""
        found = {worker.worker_id: differences(self._members.identity, worker.identity) for worker in workers}
        others = {worker_id for worker_id, mismatches in found.items() if mismatches}
        for worker_id in sorted(others - self._passed_over):
            why = "; ".join(map(str, found[worker_id]))
            log.info("worker %s serves another pool", worker_id, extra={"reason": why})
        self._passed_over = others
        return [worker for worker in workers if worker.worker_id not in others]


class DiscoveryState:
    """Implements RedisState over a discovery that a supervisor runs by its name; None: the router has no Redis."""

    def __init__(self, discovery: Discovery | None, supervisor: Supervisor, name: str) -> None:
        self._discovery, self._supervisor, self._name = discovery, supervisor, name

    @property
    def connected(self) -> bool:
        found = self._discovery
        return found is not None and found.connected and self._name not in self._supervisor.failing

    @property
    def problem(self) -> str:
        return self._discovery.problem if self._discovery is not None else ""


def _kind(why: str) -> str:
    """Return a reason without its numbers: the age of an entry is another one at each poll."""
    return _NUMBER.sub("", why)


def _named(refused: dict[str, str]) -> Iterator[str]:
    """Yield words for the first few entries, and how many more there are."""
    for name in list(refused)[:MAX_NAMED_ENTRIES]:
        yield f"{name}: {refused[name]}"
    if len(refused) > MAX_NAMED_ENTRIES:
        yield f"and {len(refused) - MAX_NAMED_ENTRIES} more"
