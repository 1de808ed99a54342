"""Workers found in a real Redis: who joins, who is dropped, and what a Redis that is away means."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.contracts.clock import ManualClock
from common.contracts.index_format import DISCOVERY_WORKERS_KEY, DiscoveredWorker, discovered_to_value, discovery_key
from common.contracts.limits import MAX_DISCOVERY_ENTRY_AGE_S
from common.contracts.types import KvGeometry, PoolIdentity
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis
from router.contracts.identity import UNKNOWN_GEOMETRY
from router.workers.discovery import Discovery, EntryRules

FULL = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 1, 8, 8, "float32"))
LEASE_S = 5.0


class Pool:
    """The pool of workers as discovery sees it."""

    def __init__(self) -> None:
        self.identity = replace(FULL, kv_geometry=UNKNOWN_GEOMETRY)
        self.addresses: list[str] = []
        self.connected: set[str] = set()

    def add_worker(self, address: str) -> None:
        if address not in self.addresses:
            self.addresses.append(address)

    def remove(self, address: str) -> None:
        self.addresses.remove(address)

    def is_connected(self, address: str) -> bool:
        return address in self.connected


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def discovery(redis_client: Redis, pool: Pool, clock: ManualClock) -> Discovery:
    return Discovery(redis_client, pool, clock, LEASE_S)


def address_of(name: str) -> str:
    return f"localhost:{1 + sum(name.encode())}"


async def announce(redis: Redis, name: str, identity: PoolIdentity = FULL) -> str:
    worker = DiscoveredWorker(name, address_of(name), "00", identity)
    await redis.sadd(DISCOVERY_WORKERS_KEY, name)
    await redis.set(discovery_key(name), discovered_to_value(worker, None, 0.0), px=60_000)
    return worker.address


async def test_a_worker_that_announces_itself_is_used(discovery: Discovery, pool: Pool, redis_client: Redis) -> None:
    await discovery.poll()
    assert pool.addresses == []
    await announce(redis_client, "w0")
    await announce(redis_client, "w1")
    await discovery.poll()
    assert pool.addresses == [address_of("w0"), address_of("w1")]


async def test_a_worker_without_lease_or_connection_is_dropped(
    discovery: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    await announce(redis_client, "w0")
    await discovery.poll()
    await redis_client.delete(discovery_key("w0"))
    clock.advance(LEASE_S - 0.1)
    await discovery.poll()
    assert pool.addresses == [address_of("w0")]
    clock.advance(0.1)
    await discovery.poll()
    assert pool.addresses == []


async def test_a_worker_that_is_connected_is_kept_without_a_lease(
    discovery: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    pool.connected.add(await announce(redis_client, "w0"))
    await discovery.poll()
    await redis_client.flushall()
    clock.advance(10 * LEASE_S)
    await discovery.poll()
    assert pool.addresses == [address_of("w0")]


async def test_a_worker_that_moved_is_used_at_its_new_address(
    discovery: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    await announce(redis_client, "w0")
    await discovery.poll()
    moved = DiscoveredWorker("w0", "127.0.0.1:9", "01", FULL)
    await redis_client.set(discovery_key("w0"), discovered_to_value(moved, None, 0.0))
    await discovery.poll()
    clock.advance(LEASE_S)
    await discovery.poll()
    assert pool.addresses == ["127.0.0.1:9"]


async def test_workers_of_another_pool_are_passed_over(discovery: Discovery, pool: Pool, redis_client: Redis) -> None:
    await announce(redis_client, "other-model", replace(FULL, model_fingerprint="x" * 32))
    await announce(redis_client, "other-blocks", replace(FULL, block_size=32))
    await announce(redis_client, "ours")
    await discovery.poll()
    assert pool.addresses == [address_of("ours")]


async def test_a_key_that_nobody_understands_is_passed_over(
    discovery: Discovery, pool: Pool, redis_client: Redis
) -> None:
    await announce(redis_client, "w0")
    await announce(redis_client, "w1")
    await redis_client.set(discovery_key("w0"), b"{}")
    await discovery.poll()
    assert pool.addresses == [address_of("w1")]


async def test_time_without_redis_does_not_count_against_a_lease(pool: Pool, clock: ManualClock) -> None:
    server = LocalRedis()
    await asyncio.to_thread(server.start)
    client = open_redis(server.url, 5.0)
    discovery = Discovery(client, pool, clock, LEASE_S)
    try:
        await announce(client, "w0")
        await discovery.poll()
        server.kill()
        clock.advance(10 * LEASE_S)
        await discovery.poll()
        assert (discovery.connected, pool.addresses) == (False, [address_of("w0")])
        await asyncio.to_thread(server.start)
        await discovery.poll()
        assert (discovery.connected, pool.addresses) == (True, [address_of("w0")])
        clock.advance(LEASE_S)
        await discovery.poll()
        assert pool.addresses == []
    finally:
        await client.aclose()
        server.stop()


KEY, BEHIND = b"k" * 32, 4_000


async def sign(redis: Redis, written: float, name: str = "w0") -> str:
    worker = DiscoveredWorker(name, address_of(name), "00", FULL)
    await redis.sadd(DISCOVERY_WORKERS_KEY, name)
    await redis.set(discovery_key(name), discovered_to_value(worker, KEY, written), px=600_000)
    return worker.address


@pytest.fixture
def signed(redis_client: Redis, pool: Pool, clock: ManualClock) -> Discovery:
    return Discovery(redis_client, pool, clock, LEASE_S, EntryRules(KEY))


class SetClock(ManualClock):
    """The clock of a machine whose time of day is set; time passes all the same."""

    ahead = 0.0

    def time_ns(self) -> int:
        return super().time_ns() + int(self.ahead * 1e9)


@pytest.mark.parametrize("ahead", [-MAX_DISCOVERY_ENTRY_AGE_S - LEASE_S, MAX_DISCOVERY_ENTRY_AGE_S + LEASE_S, BEHIND])
async def test_clocks_that_differ_from_now_on_drop_no_worker_whose_entries_go_on(
    pool: Pool, redis_client: Redis, ahead: float
) -> None:
    """A worker that has no connection for a moment has its key alone. Its manager goes on writing that."""
    clock = SetClock(10_000.0)
    signed = Discovery(redis_client, pool, clock, LEASE_S, EntryRules(KEY))
    address = await sign(redis_client, clock.now)
    await signed.poll()
    clock.ahead = ahead
    for _ in range(12):
        clock.advance(LEASE_S - 1)
        await sign(redis_client, clock.now)
        await signed.poll()
        assert (pool.addresses, signed.problem) == ([address], "")


@pytest.mark.parametrize("instead", [None, b"nonsense"])
async def test_a_worker_whose_entry_is_missing_for_a_while_comes_back_though_the_clocks_differ(
    pool: Pool, redis_client: Redis, instead: bytes | None
) -> None:
    """Redis was wiped or overwritten, or the manager was away. Then the manager writes the entry again."""
    clock = SetClock(10_000.0)
    signed = Discovery(redis_client, pool, clock, LEASE_S, EntryRules(KEY))
    address = await sign(redis_client, clock.now)
    await signed.poll()
    clock.ahead = BEHIND
    clock.advance(1.0)
    await redis_client.delete(discovery_key("w0"))
    if instead is not None:
        await redis_client.set(discovery_key("w0"), instead)
    for _ in range(3):
        await signed.poll()
        clock.advance(LEASE_S)
    assert pool.addresses == []
    await sign(redis_client, clock.now)
    await signed.poll()
    assert (pool.addresses, signed.problem) == ([address], "")


async def test_entries_that_counted_are_known_for_an_hour_and_only_so_many(
    pool: Pool, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.discovery.MAX_KNOWN_ENTRIES", 2)
    clock = SetClock(10_000.0)
    signed = Discovery(redis_client, pool, clock, LEASE_S, EntryRules(KEY))
    for name in ("w0", "w1", "w2"):
        await sign(redis_client, clock.now, name)
        await signed.poll()
        await redis_client.delete(discovery_key(name))
        clock.advance(1.0)
    clock.ahead = BEHIND
    for name in ("w0", "w1"):
        await sign(redis_client, clock.now, name)
    await signed.poll()
    assert list(signed._known) == [b"w2", b"w1"], "the one that counted longest ago is forgotten"
    assert signed.problem.startswith("'w0': its date is")
    await redis_client.delete(discovery_key("w0"), discovery_key("w1"))
    clock.advance(3_601.0)
    await signed.poll()
    assert not signed._known


async def test_clocks_that_drift_apart_slowly_drop_no_worker(
    signed: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    written = clock.time_ns() / 1e9
    address = await sign(redis_client, written)
    for step in range(1, 101):  # some 50 days
        await signed.poll()
        assert (pool.addresses, signed.problem) == ([address], "")
        clock.advance(43_200.0)
        await sign(redis_client, written + step * 43_200.0 * 0.995)


async def test_recorded_entries_that_are_released_slowly_count_no_longer_than_a_while(
    signed: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    """Who can write Redis may have recorded an hour of entries of a worker that is gone."""
    await sign(redis_client, 0.0)
    await signed.poll()
    for written in range(1, 3_600):
        clock.advance(10.0)
        await sign(redis_client, written)
        await signed.poll()
        if not pool.addresses:
            break
    assert clock.now - written <= 3 * MAX_DISCOVERY_ENTRY_AGE_S
    assert "compare the clocks" in signed.problem


async def test_an_old_entry_that_stays_the_same_keeps_no_worker(
    signed: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    """Who can write Redis, but has no key, may write the last entry of a worker that is gone again and again."""
    written = clock.time_ns() / 1e9
    address = await sign(redis_client, written)
    await signed.poll()
    assert pool.addresses == [address]
    for _ in range(3):
        clock.advance(BEHIND)
        await sign(redis_client, written)
        await signed.poll()
    assert pool.addresses == []
    await sign(redis_client, written - 1)
    await signed.poll()
    assert "compare the clocks" in signed.problem


async def test_a_router_that_starts_beside_another_clock_says_what_is_wrong(
    signed: Discovery, pool: Pool, redis_client: Redis, clock: ManualClock
) -> None:
    now = clock.time_ns() / 1e9
    for second in range(3):
        await sign(redis_client, now + 400 + second)
        await signed.poll()
    assert pool.addresses == []
    words = r"its date is \+40\d s off this router's clock; at most 300 s count: compare the clocks"
    assert re.search(words, signed.problem), signed.problem
