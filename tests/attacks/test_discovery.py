"""What somebody writes into Redis must not end discovery: the router goes on finding the workers of its pool."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from redis.asyncio import Redis

from common.contracts.clock import ManualClock, SystemClock
from common.contracts.index_format import DISCOVERY_WORKERS_KEY, DiscoveredWorker, discovered_to_value, discovery_key
from common.contracts.limits import MAX_DISCOVERED_WORKERS
from common.contracts.types import KvGeometry, PoolIdentity
from router.workers.discovery import Discovery, EntryRules

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 1, 8, 8, "float32"))
PATIENCE_S = 60.0


class Pool:
    """The addresses that discovery gives to the router."""

    def __init__(self) -> None:
        self.identity = IDENTITY
        self.addresses: list[str] = []

    def add_worker(self, address: str) -> None:
        if address not in self.addresses:
            self.addresses.append(address)

    def remove(self, address: str) -> None:
        self.addresses.remove(address)

    def is_connected(self, address: str) -> bool:
        return False


async def announce(redis: Redis, name: str, address: str, identity: PoolIdentity = IDENTITY) -> None:
    worker = DiscoveredWorker(name, address, "00", identity)
    await redis.set(discovery_key(name), discovered_to_value(worker, None, 0.0))
    await redis.sadd(DISCOVERY_WORKERS_KEY, name)


@asynccontextmanager
async def running(discovery: Discovery) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(discovery.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def until_found(pool: Pool, address: str, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while address not in pool.addresses:
            assert not task.done(), f"discovery has ended: {task.exception()!r}"
            await asyncio.sleep(0.02)


NESTED = b"- " + b"[" * 4000
# By what it is: a worker id, and the value of its entry.
HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "a member that is not UTF-8": (b"\xff\xfe", b"x"),
    "nested JSON": (b"evil", NESTED),
    "deeply nested JSON": (b"evil", b"- " + b'{"a":' * 100_000),
    "nested JSON without a signature": (b"evil", b"[" * 100_000),
    "a value of megabytes": (b"evil", b"- " + json.dumps({"worker_id": "x" * (8 << 20)}).encode()),
    "numbers of another kind": (b"evil", b'- {"identity": {"kv_geometry": [1e400]}, "written": NaN}'),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_malformed_entry_ends_no_discovery(redis_client: Redis, what: str) -> None:
    """The unmended router found no worker any more, and went on saying that Redis was connected."""
    name, value = HOSTILE[what]
    await redis_client.sadd(DISCOVERY_WORKERS_KEY, name)
    await redis_client.set(discovery_key("").encode() + name, value)
    pool = Pool()
    discovery = Discovery(redis_client, pool, SystemClock())
    async with running(discovery) as task:
        await announce(redis_client, "innocent", "127.0.0.1:7001")
        await until_found(pool, "127.0.0.1:7001", task)
        assert discovery.connected
        assert discovery.problem
    assert pool.addresses == ["127.0.0.1:7001"]


async def test_a_key_of_another_type_hides_its_own_worker_alone(redis_client: Redis) -> None:
    await redis_client.sadd(DISCOVERY_WORKERS_KEY, "evil")
    await redis_client.sadd(discovery_key("evil"), "no string")
    await announce(redis_client, "innocent", "127.0.0.1:7001")
    pool = Pool()
    discovery = Discovery(redis_client, pool, SystemClock())
    await discovery.poll()
    assert (pool.addresses, discovery.connected) == (["127.0.0.1:7001"], True)
    assert "evil" in discovery.problem


async def test_members_without_number_cost_a_bounded_poll(
    redis_client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.workers.discovery")
    names = [f"other-{number}" for number in range(2 * MAX_DISCOVERED_WORKERS)]
    for begin in range(0, len(names), 512):
        await redis_client.sadd(DISCOVERY_WORKERS_KEY, *names[begin : begin + 512])
    pool = Pool()
    discovery = Discovery(redis_client, pool, SystemClock())
    for _ in range(3):
        await discovery.poll()
    assert f"{len(names)} members" in discovery.problem
    assert len(caplog.records) == 1, "the size of the set is logged once"
    await redis_client.sadd(DISCOVERY_WORKERS_KEY, *("x" * 1000 + str(number) for number in range(2000)))
    await discovery.poll()
    assert "is not read" in discovery.problem
    assert discovery.connected


async def test_what_is_passed_over_is_remembered_while_it_stands_there(
    redis_client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The unmended router remembered each id for ever."""
    caplog.set_level(logging.INFO, "router.workers.discovery")
    other = PoolIdentity("another" * 5, "t" * 32, 16, IDENTITY.kv_geometry)
    discovery = Discovery(redis_client, Pool(), SystemClock())
    for generation in range(5):
        await redis_client.flushall()
        for number in range(4):
            await announce(redis_client, f"w{generation}-{number}", "127.0.0.1:7001", other)
            await redis_client.sadd(DISCOVERY_WORKERS_KEY, f"evil-{generation}-{number}")
            await redis_client.set(discovery_key(f"evil-{generation}-{number}"), b"x")
        for _ in range(3):
            await discovery.poll()
        assert len(discovery._passed_over) == 4
        assert len(discovery._refused) == 4
    assert len(caplog.records) == 5 * (4 + 1)


async def test_entries_of_another_clock_are_logged_once_although_their_age_changes(
    redis_client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the manager is an hour ahead, and an hour behind later; it writes each entry again and again."""
    caplog.set_level(logging.INFO, "router.workers.discovery")
    clock, key = ManualClock(), b"k" * 32
    discovery = Discovery(redis_client, Pool(), clock, rules=EntryRules(key))
    await redis_client.sadd(DISCOVERY_WORKERS_KEY, "w0")
    for jump in (3600.0, -3600.0):
        for second in range(5):
            written = clock.time_ns() / 1e9 + jump + second
            value = discovered_to_value(DiscoveredWorker("w0", "127.0.0.1:7001", "00", IDENTITY), key, written)
            await redis_client.set(discovery_key("w0"), value)
            await discovery.poll()
            assert "compare the clocks" in discovery.problem
    assert len(caplog.records) == 1
