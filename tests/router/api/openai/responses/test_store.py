"""Stored responses, in memory and in a real Redis: of one tenant alone, bounded, and gone after their time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from common.contracts.clock import ManualClock
from common.contracts.errors import Unavailable
from common.contracts.limits import MAX_RESPONSE_BYTES
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis
from router.api.openai.responses.store import MemoryStore, RedisStore, ResponseStore, StoreLimits

PATIENT_S = 60.0
NewStore = Callable[[StoreLimits], ResponseStore]


@pytest.fixture(params=["memory", "redis"])
async def new_store(request: pytest.FixtureRequest) -> AsyncIterator[NewStore]:
    clock = ManualClock(100.0)
    if request.param == "memory":
        yield lambda bounds: MemoryStore(bounds, clock)
        return
    client = open_redis(request.getfixturevalue("redis_url"), PATIENT_S)
    yield lambda bounds: RedisStore(client, bounds, clock)
    await client.aclose()


async def kept(store: ResponseStore, tenant: str, *names: str) -> list[str]:
    return [name for name in names if await store.get(tenant, name) is not None]


async def test_an_entry_is_read_as_it_was_written_until_it_is_deleted(new_store: NewStore) -> None:
    store = new_store(StoreLimits())
    await store.put("acme", "a", b"\x00one")
    await store.put("acme", "a", b"\x00two")
    assert await store.get("acme", "a") == b"\x00two"
    assert await store.delete("acme", "a")
    assert await store.get("acme", "a") is None
    assert not await store.delete("acme", "a")


async def test_an_entry_is_replaced_while_it_is_the_expected_one(new_store: NewStore) -> None:
    store = new_store(StoreLimits())
    assert not await store.replace("acme", "a", b"1", b"0")
    assert await store.replace("acme", "a", b"\x001", None)
    assert not await store.replace("acme", "a", b"2", None)
    assert not await store.replace("acme", "a", b"2", b"\x000")
    assert not await store.replace("other", "a", b"2", b"\x001")
    assert await store.get("acme", "a") == b"\x001"
    assert await store.replace("acme", "a", b"2", b"\x001")
    assert await store.get("acme", "a") == b"2"


async def test_a_tenant_has_no_entry_of_another(new_store: NewStore) -> None:
    store = new_store(StoreLimits())
    await store.put("peer ::1 ~*:", "a", b"1")
    assert await store.get("peer ::1", "a") is None
    assert not await store.delete("peer ::1", "a")
    assert await store.get("peer ::1 ~*:", "a") == b"1"


async def test_the_oldest_entries_of_a_tenant_make_room(new_store: NewStore) -> None:
    store = new_store(StoreLimits(entries_of_tenant=2, bytes_of_tenant=10))
    for name in "abc":
        await store.put("acme", name, b"1")
    await store.put("other", "z", b"1")
    assert await kept(store, "acme", *"abc") == ["b", "c"]
    await store.put("acme", "d", b"1" * 10)
    assert await kept(store, "acme", *"abcd") == ["d"]
    assert await kept(store, "other", "z") == ["z"]


@pytest.mark.parametrize("bounds", [StoreLimits(total_bytes=10), StoreLimits(entries=3)])
async def test_the_largest_tenant_makes_room_for_others(new_store: NewStore, bounds: StoreLimits) -> None:
    store = new_store(bounds)
    for name in "abc":
        await store.put("large", name, b"333")
    await store.put("small", "z", b"22")
    assert await kept(store, "large", *"abc") == ["b", "c"]
    assert await kept(store, "small", "z") == ["z"]


async def test_entries_of_a_thousand_tenants_stay_within_the_bounds(new_store: NewStore) -> None:
    store = new_store(StoreLimits(entries=5, total_bytes=100))
    for number in range(200):
        await store.put(f"tenant {number}", "a", b"1" * (number % 40))
    left = [number for number in range(200) if await store.get(f"tenant {number}", "a") is not None]
    assert len(left) <= 5
    assert sum(number % 40 for number in left) <= 100


async def test_too_large_an_entry_for_its_tenant_is_not_kept(new_store: NewStore) -> None:
    store = new_store(StoreLimits(bytes_of_tenant=10))
    await store.put("acme", "a", b"1" * 11)
    assert await store.get("acme", "a") is None


async def test_an_entry_in_memory_ends_after_its_time() -> None:
    clock = ManualClock(100.0)
    store = MemoryStore(StoreLimits(seconds=10), clock)
    await store.put("acme", "a", b"1")
    clock.advance(10.5)
    assert await store.get("acme", "a") is None
    await store.put("other", "b", b"1")
    assert (store.count, store.size) == (1, 1)


async def test_an_entry_in_redis_ends_after_its_time(redis_client: Redis) -> None:
    store = RedisStore(redis_client, StoreLimits(seconds=50), ManualClock(1.0))
    await store.put("acme", "a", b"1")
    (key,) = [key async for key in redis_client.scan_iter("*entry:*")]
    assert 0 < await redis_client.pttl(key) <= 50_000


async def test_the_books_in_redis_forget_what_expired(redis_client: Redis) -> None:
    store = RedisStore(redis_client, StoreLimits(), ManualClock(1.0))
    await store.put("acme", "a", b"123")
    member: Any = (await redis_client.zrange("quire-responses:ends", 0, 0))[0]
    await redis_client.zadd("quire-responses:ends", {member: 1})
    await store.put("other", "b", b"1")
    assert await redis_client.zcard("quire-responses:ends") == 1
    assert await redis_client.get("quire-responses:total") == b"1"
    assert await redis_client.hlen("quire-responses:sizes") == 1


async def test_whatever_is_written_into_redis_is_not_read_beyond_the_bound(redis_client: Redis) -> None:
    store = RedisStore(redis_client, StoreLimits(), ManualClock(1.0))
    await store.put("acme", "a", b"1")
    (key,) = [key async for key in redis_client.scan_iter("*entry:*")]
    await redis_client.set(key, b"1" * (MAX_RESPONSE_BYTES + 1))
    assert await store.get("acme", "a") is None


async def test_a_redis_that_is_away_loses_entries_and_says_so_to_readers() -> None:
    server = LocalRedis()
    client = open_redis(server.url, PATIENT_S)
    clock = ManualClock(1.0)
    store = RedisStore(client, StoreLimits(), clock)
    await store.put("acme", "a", b"1")
    for _ in range(5):
        with pytest.raises(Unavailable, match="does not answer"):
            await store.get("acme", "a")
    await client.aclose()
