"""The index in a real Redis: slots, generations, entries of several workers, the fence."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.resources import files
from typing import cast

import pytest
from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.errors import StaleEpoch
from common.contracts.types import BlockHash
from common.process.redis_client import open_redis
from kvmanager.contracts.ports import FenceLost, IndexCall, IndexUnavailable, WorkerEntry
from kvmanager.contracts.slots import NoSlot
from kvmanager.index import scripts
from kvmanager.index.store import TIMEOUT_S, RedisIndexStore
from tests.support.kvmanager.index_reader import index_members

NAMESPACE = "{quire:m:t:16}"
H = [BlockHash(bytes([number]) * 16) for number in range(4)]


def worker(name: str, generation: int = 1) -> WorkerEntry:
    return WorkerEntry(name, name * 8, f"{name}:1", generation)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisIndexStore]:
    store = RedisIndexStore(open_redis(redis_url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 0)
    assert await store.acquire(0, 0) == 1
    yield store
    await store.close()


async def entries(redis_client: Redis, key: BlockHash) -> list[tuple[int, int]]:
    value = await redis_client.get(index_format.prefix_key_root(NAMESPACE) + key)
    assert value is None or isinstance(value, bytes)
    return index_format.unpack_entries(value or b"")


async def owner_of(redis_client: Redis, slot: int) -> index_format.SlotOwner:
    fields = await redis_client.hgetall(index_format.slot_key(NAMESPACE, slot))
    owner = index_format.owner_from_fields(cast("dict[bytes, bytes]", fields))
    assert owner is not None
    return owner


async def test_slots_are_allotted_in_order_and_kept(store: RedisIndexStore) -> None:
    assert [await store.register(1, worker(name)) for name in ("a", "b", "a", "c")] == [0, 1, 0, 2]


async def test_owner_of_a_slot_is_described(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 2**32 - 1))
    assert await owner_of(redis_client, 0) == index_format.SlotOwner("a", "a" * 8, "a:1", 2**32 - 1)
    assert await redis_client.pttl(index_format.slot_key(NAMESPACE, 0)) == -1
    assert 0 < await redis_client.pttl(index_format.liveness_key(NAMESPACE, 0)) <= 5000


async def test_slot_of_a_worker_that_is_gone_is_used_again(store: RedisIndexStore, redis_client: Redis) -> None:
    for name in ("a", "b", "c"):
        await store.register(1, worker(name))
    await redis_client.delete(index_format.liveness_key(NAMESPACE, 1))
    assert await store.register(1, worker("d")) == 1
    assert await store.register(1, worker("b")) == 3


async def test_no_slot_is_left_when_all_are_taken_by_live_workers(
    store: RedisIndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_format, "MAX_SLOTS", 2)
    assert [await store.register(1, worker(name)) for name in ("a", "b", "c")] == [0, 1, NoSlot.FULL]


async def test_entries_of_several_workers_stand_side_by_side(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.register(1, worker("b", 20))
    await store.update(1, 0, 10, IndexCall((), (H[0], H[1])))
    await store.update(1, 1, 20, IndexCall((), (H[0],)))
    assert await entries(redis_client, H[0]) == [(0, 10), (1, 20)]
    await store.update(1, 0, 10, IndexCall((H[0], H[1]), ()))
    assert await entries(redis_client, H[0]) == [(1, 20)]
    assert not await redis_client.exists(index_format.prefix_key_root(NAMESPACE) + H[1])


async def test_writing_twice_leaves_one_entry(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    for _ in range(2):
        await store.update(1, 0, 10, IndexCall((), (H[0],)))
    assert await entries(redis_client, H[0]) == [(0, 10)]


async def test_dead_generations_go_from_the_keys_that_are_touched(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.register(1, worker("b", 20))
    await store.update(1, 0, 10, IndexCall((), (H[0], H[1], H[2])))
    await store.register(1, worker("a", 11))
    await store.update(1, 1, 20, IndexCall((H[1],), (H[0],)))
    assert await entries(redis_client, H[0]) == [(1, 20)]
    assert await entries(redis_client, H[1]) == []
    assert await entries(redis_client, H[2]) == [(0, 10)]  # not touched, and dead to every reader


async def test_generations_of_all_32_bits_are_compared_exactly(store: RedisIndexStore, redis_client: Redis) -> None:
    for generation in (0, 1, 2**31, 2**32 - 1, 0x01020304):
        await store.register(1, worker("a", generation))
        await store.update(1, 0, generation, IndexCall((), (H[0],)))
        await store.register(1, worker("b", 5))
        await store.update(1, 1, 5, IndexCall((), (H[0],)))
        assert await entries(redis_client, H[0]) == [(0, generation), (1, 5)]
        await store.update(1, 1, 5, IndexCall((H[0],), ()))


async def test_publishing_refreshes_the_life_of_a_key(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.update(1, 0, 10, IndexCall((), (H[0],)))
    key = index_format.prefix_key_root(NAMESPACE) + H[0]
    await redis_client.pexpire(key, 1000)
    await store.update(1, 0, 10, IndexCall((), (H[0],)))
    assert 1000 < await redis_client.pttl(key) <= 60_000


async def test_removing_leaves_the_life_of_the_others_alone(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.register(1, worker("b", 20))
    for slot, generation in ((0, 10), (1, 20)):
        await store.update(1, slot, generation, IndexCall((), (H[0],)))
    key = index_format.prefix_key_root(NAMESPACE) + H[0]
    await redis_client.pexpire(key, 1000)
    await store.update(1, 0, 10, IndexCall((H[0],), ()))
    assert 0 < await redis_client.pttl(key) <= 1000


async def test_one_call_may_remove_and_add(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.update(1, 0, 10, IndexCall((), (H[0], H[1])))
    await store.update(1, 0, 10, IndexCall((H[1],), (H[2],)))
    assert await index_members(redis_client, NAMESPACE, 0, 10) == {H[0], H[2]}


WRITES = {
    "register": lambda store, epoch: store.register(epoch, worker("b")),
    "update": lambda store, epoch: store.update(epoch, 0, 10, IndexCall((H[0],), (H[1],))),
    "renew": lambda store, epoch: store.renew(epoch, {0: 10}, {}),
    "retire": lambda store, epoch: store.retire(epoch, 0, 10, "a"),
}


@pytest.mark.parametrize("write", WRITES)
async def test_replaced_manager_writes_nothing(store: RedisIndexStore, redis_client: Redis, write: str) -> None:
    await store.register(1, worker("a", 10))
    await store.update(1, 0, 10, IndexCall((), (H[0],)))
    await store.acquire(1, 0)
    before = {key: await redis_client.dump(key) for key in await redis_client.keys()}
    with pytest.raises(StaleEpoch, match="of epoch 2 has taken over from this one, of epoch 1"):
        await WRITES[write](store, 1)
    assert {key: await redis_client.dump(key) for key in await redis_client.keys()} == before


@pytest.mark.parametrize("write", WRITES)
async def test_missing_fence_is_a_refusal(store: RedisIndexStore, redis_client: Redis, write: str) -> None:
    await redis_client.flushall()
    with pytest.raises(FenceLost, match="wiped"):
        await WRITES[write](store, 1)
    assert await redis_client.keys() == []


async def test_older_fence_of_a_restored_redis_is_a_refusal_too(store: RedisIndexStore) -> None:
    with pytest.raises(FenceLost):
        await store.register(7, worker("a"))


async def test_renewal_prolongs_liveness_and_discovery(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.renew(1, {0: 10}, {"a": "{}"})
    assert 4000 < await redis_client.pttl(index_format.liveness_key(NAMESPACE, 0)) <= 5000
    assert 4000 < await redis_client.pttl(index_format.discovery_key("a")) <= 5000
    assert await redis_client.smembers(index_format.DISCOVERY_WORKERS_KEY) == {b"a"}


async def test_workers_without_an_entry_leave_the_set(store: RedisIndexStore, redis_client: Redis) -> None:
    """A manager that was killed leaves the ids of its workers behind; they must not pile up."""
    await redis_client.sadd(index_format.DISCOVERY_WORKERS_KEY, *(f"gone-{number}" for number in range(100)))
    await redis_client.sadd(index_format.DISCOVERY_WORKERS_KEY, "of another manager")
    await redis_client.set(index_format.discovery_key("of another manager"), "{}")
    await store.renew(1, {}, {"a": "{}"})
    assert await redis_client.smembers(index_format.DISCOVERY_WORKERS_KEY) == {b"a", b"of another manager"}


async def test_retired_worker_has_no_live_entries(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.renew(1, {0: 10}, {"a": "{}"})
    await store.retire(1, 0, 10, "a")
    owner = await owner_of(redis_client, 0)
    assert replace(owner, generation=10) == index_format.SlotOwner("a", "a" * 8, "a:1", 10)
    assert owner.generation != 10
    assert await redis_client.smembers(index_format.DISCOVERY_WORKERS_KEY) == set()


async def test_worker_that_came_back_is_not_retired(store: RedisIndexStore, redis_client: Redis) -> None:
    await store.register(1, worker("a", 10))
    await store.register(1, worker("a", 11))
    await store.retire(1, 0, 10, "a")
    assert (await owner_of(redis_client, 0)).generation == 11


async def test_redis_that_is_not_there_is_named_unavailable() -> None:
    store = RedisIndexStore(open_redis("redis://127.0.0.1:1/0", TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 0)
    with pytest.raises(IndexUnavailable):
        await store.acquire(0, 0)


async def test_every_script_loads_in_redis_and_is_part_of_the_package(redis_url: str) -> None:
    """Redis compiles a script when it is loaded; a script that is missing from the package fails before that."""
    names = sorted(each.name for each in files("kvmanager.index").iterdir() if each.name.endswith(".lua"))
    scripts_in_use = [
        "acquire",
        "epoch_in",
        "fenced",
        "field_of",
        "hold",
        "pins",
        "pins_read",
        "register",
        "renew",
        "resign",
        "retire",
        "update",
    ]
    assert names == [f"{name}.lua" for name in scripts_in_use]
    async with open_redis(redis_url, TIMEOUT_S) as redis:
        of_the_index = scripts.ACQUIRE, scripts.REGISTER, scripts.UPDATE, scripts.RENEW, scripts.RETIRE, scripts.PINS
        for source in (*of_the_index, scripts.PINS_READ, scripts.HOLD, scripts.RESIGN):
            digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            assert await redis.script_load(source) == digest
