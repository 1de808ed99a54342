"""Several groups of managers on one index, in a real Redis: each has its own fence, and all share the slots."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.errors import StaleEpoch
from common.contracts.types import BlockHash
from common.process.redis_client import open_redis
from kvmanager.contracts.ports import FenceLost, IndexCall, WorkerEntry
from kvmanager.contracts.slots import Loss, NoSlot, Registration, loss, registered, writable
from kvmanager.index.store import TIMEOUT_S, RedisIndexStore
from tests.support.kvmanager.index_reader import index_members

NAMESPACE = "{quire:m:t:16}"
H = [BlockHash(bytes([number]) * 16) for number in range(4)]
STEPS = 600

StoreOf = Callable[..., RedisIndexStore]


@pytest.fixture
async def store_of(redis_url: str) -> AsyncIterator[StoreOf]:
    """Return what makes the index of a group, as a manager of a term has it."""
    async with AsyncExitStack() as stack:

        def make(group: str, term: int = 1) -> RedisIndexStore:
            redis = open_redis(redis_url, TIMEOUT_S)
            store = RedisIndexStore(redis, NAMESPACE, 60.0, 60.0, lambda: 0, term if group else 0, group)
            stack.push_async_callback(store.close)
            return store

        yield make


def entry(worker: str, generation: int, session: int = 1, life: str = "life") -> WorkerEntry:
    return WorkerEntry(worker, life, f"{worker}:1", generation, session)


async def test_an_epoch_of_one_group_fences_no_other_one(store_of: StoreOf, redis_client: Redis) -> None:
    stores = {group: store_of(group) for group in ("a", "b", "c", "")}
    epochs = {group: await store.acquire(1, 0) for group, store in stores.items()}
    assert len(set(epochs.values())) == 4  # no two managers hold one epoch
    for number, (group, store) in enumerate(stores.items()):
        assert await store.register(epochs[group], entry(f"w-{group}", number)) == number
        assert await store.update(epochs[group], number, number, IndexCall((), (H[0],)))
    after = await stores["b"].acquire(epochs["b"] + 1, epochs["b"])
    for number, (group, store) in enumerate(stores.items()):
        epoch = after if group == "b" else epochs[group]
        assert await store.renew(epoch, {number: number}, {}) == {}
        assert await index_members(redis_client, NAMESPACE, number, number) == {H[0]}
    with pytest.raises(StaleEpoch):
        await stores["b"].renew(epochs["b"], {1: 1}, {})


async def test_a_past_leader_of_one_group_is_fenced_and_its_worker_moves_to_another_group(
    store_of: StoreOf, redis_client: Redis
) -> None:
    past, now, other = store_of("a", 1), store_of("a", 2), store_of("b")
    first = await past.acquire(1, 0)
    assert await past.register(first, entry("w", 10)) == 0
    second = await now.acquire(1, 0)
    with pytest.raises(StaleEpoch):
        await past.update(first, 0, 10, IndexCall((), (H[0],)))
    with pytest.raises(StaleEpoch):
        await past.acquire(second + 5, 0)
    theirs = await other.acquire(1, 0)
    assert await other.register(theirs, entry("w", 30, session=2)) == 0
    assert await other.update(theirs, 0, 30, IndexCall((), (H[1],)))
    # The new leader of the first group, too, has an older session of this worker at most.
    assert not await now.update(second, 0, 10, IndexCall((H[1],), (H[0],)))
    assert await now.renew(second, {0: 10}, {}) == {0: Loss.TAKEN}
    assert await now.register(second, entry("w", 11)) is NoSlot.ELSEWHERE
    await now.retire(second, 0, 10, "w")
    assert await index_members(redis_client, NAMESPACE, 0, 30) == {H[1]}
    assert await other.renew(theirs, {0: 30}, {}) == {}


async def test_each_group_finds_a_wiped_index_by_itself(store_of: StoreOf, redis_client: Redis) -> None:
    stores = [store_of("a"), store_of("b")]
    epochs = [await store.acquire(1, 0) for store in stores]
    for number, store in enumerate(stores):
        assert await store.register(epochs[number], entry(f"w{number}", number)) == number
    await redis_client.flushall()
    with pytest.raises(FenceLost):
        await stores[1].renew(epochs[1], {1: 1}, {})
    epochs[1] = await stores[1].acquire(epochs[1] + 1, epochs[1])
    assert await stores[1].register(epochs[1], entry("w1", 5)) == 0
    with pytest.raises(FenceLost):  # its slot 0 is that of the other group's worker now
        await stores[0].update(epochs[0], 0, 0, IndexCall((), (H[0],)))
    epochs[0] = await stores[0].acquire(epochs[0] + 1, epochs[0])
    assert epochs[0] > epochs[1]
    assert await stores[0].register(epochs[0], entry("w0", 6)) == 1


async def test_a_slot_that_another_group_took_meanwhile_is_not_written(store_of: StoreOf, redis_client: Redis) -> None:
    """A group that cannot reach Redis does not renew its workers' slots; others then use them."""
    away, other = store_of("a"), store_of("b")
    first, second = await away.acquire(1, 0), await other.acquire(1, 0)
    assert await away.register(first, entry("w0", 10)) == 0
    await redis_client.delete(index_format.liveness_key(NAMESPACE, 0))
    assert await other.register(second, entry("w1", 20)) == 0
    assert await other.update(second, 0, 20, IndexCall((), (H[0],)))
    assert not await away.update(first, 0, 10, IndexCall((H[0],), (H[1],)))
    assert await away.renew(first, {0: 10}, {}) == {0: Loss.TAKEN}
    assert await index_members(redis_client, NAMESPACE, 0, 20) == {H[0]}
    assert await index_members(redis_client, NAMESPACE, 0, 10) == set()
    assert await away.register(first, entry("w0", 11)) == 1


async def test_a_slot_that_a_wipe_removed_was_taken_by_nobody(store_of: StoreOf, redis_client: Redis) -> None:
    """A worker that attaches after the wipe lets its manager take a fence anew, before the lease is due."""
    store = store_of("")
    epoch = await store.acquire(1, 0)
    slots = [await store.register(epoch, entry(f"w{number}", 10 + number)) for number in range(2)]
    await redis_client.flushall()
    epoch = await store.acquire(epoch + 1, epoch)
    assert not await store.update(epoch, 0, 10, IndexCall((), (H[0],)))
    assert slots == [0, 1]
    assert await store.renew(epoch, {0: 10, 1: 11}, {}) == {0: Loss.GONE, 1: Loss.GONE}
    await store.register(epoch, entry("w2", 12))
    assert await store.renew(epoch, {0: 10, 1: 11}, {}) == {0: Loss.TAKEN, 1: Loss.GONE}


@dataclass
class Rules:
    """What `contracts/slots.py` makes of the same calls."""

    slots: dict[int, Registration] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)

    def register(self, new: Registration, most: int) -> int | NoSlot:
        slot = registered(self.slots, frozenset(self.alive), new, most)
        if isinstance(slot, int):
            self.slots[slot] = new
            self.alive.add(slot)
        return slot

    def renew(self, slots: dict[int, int]) -> dict[int, Loss]:
        found = {slot: loss(self.slots, slot, generation) for slot, generation in slots.items()}
        self.alive.update(slot for slot, why in found.items() if why is None)
        return {slot: why for slot, why in found.items() if why is not None}


@pytest.mark.parametrize("seed", range(3))
async def test_redis_gives_slots_by_the_rules_of_the_core(
    store_of: StoreOf, redis_client: Redis, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    most, rng, rules = 4, random.Random(seed), Rules()
    monkeypatch.setattr(index_format, "MAX_SLOTS", most)
    stores = {group: store_of(group) for group in ("a", "b", "")}
    epochs = {group: await store.acquire(1, 0) for group, store in stores.items()}
    found: set[object] = set()
    for generation in range(1, STEPS):
        group, slot = rng.choice(["a", "b", ""]), rng.randrange(most)
        known = rng.choice([generation, *(each.generation for each in rules.slots.values())])
        match rng.randrange(5):
            case 0 | 1:
                worker, life = f"w{rng.randrange(6)}", f"life-{rng.randrange(2)}"
                new = Registration(worker, life, rng.randrange(4), group, generation)
                got: object = await stores[group].register(epochs[group], entry(worker, generation, new.session, life))
                expected: object = rules.register(new, most)
                found.add(expected)
            case 2:
                got = await stores[group].update(epochs[group], slot, known, IndexCall((), (H[0],)))
                expected = writable(rules.slots, slot, known)
            case 3:
                asked = {each: rng.choice([known, 0]) for each in rng.sample(range(most), 2)}
                got, expected = await stores[group].renew(epochs[group], asked, {}), rules.renew(asked)
            case _:
                got = expected = None
                await redis_client.delete(index_format.liveness_key(NAMESPACE, slot))
                rules.alive.discard(slot)
        assert got == expected
    assert found == {*range(most), NoSlot.FULL, NoSlot.ELSEWHERE}
