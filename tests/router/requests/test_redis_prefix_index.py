"""The prefix index as the router reads it, from a real Redis: hits, generations, windows, and a Redis that is away."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from common.contracts.clock import ManualClock
from common.contracts.index_format import SlotOwner, pack_entry, prefix_key_root, slot_key
from common.contracts.limits import MAX_INDEX_VALUE_BYTES
from common.contracts.types import BlockHash, KvGeometry, KvGroup, KvGroupKind, PoolIdentity
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis
from router.placement.breaker import CircuitBreaker
from router.requests.redis_prefix_index import OWNER_SECONDS, PAUSES, NoPrefixIndex, RedisPrefixIndex
from tests.support.listener import Listener
from tests.support.router.known_router import KnownRouter

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 1, 8, 8, "float32"))
NAMESPACE = IDENTITY.namespace
CHAIN = [BlockHash(number.to_bytes(16, "big")) for number in range(300)]
# Generous: these tests are about what is answered, not how fast.
PATIENT_S = 5.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
async def index(redis_url: str, clock: ManualClock) -> AsyncIterator[RedisPrefixIndex]:
    client = open_redis(redis_url, PATIENT_S)
    yield RedisPrefixIndex(client, KnownRouter(IDENTITY), clock, PATIENT_S)
    await client.aclose()


async def own(redis: Redis, slot: int, worker_id: str, generation: int) -> None:
    owner = SlotOwner(worker_id, "00", "127.0.0.1:1", generation)
    await redis.hset(slot_key(NAMESPACE, slot), mapping=asdict(owner))  # type: ignore[arg-type]


async def publish(redis: Redis, blocks: Sequence[BlockHash], *entries: tuple[int, int]) -> None:
    value = b"".join(pack_entry(slot, generation) for slot, generation in entries)
    await redis.mset({prefix_key_root(NAMESPACE) + block: value for block in blocks})


async def test_hits_are_counted_for_each_worker(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 11)
    await own(redis_client, 1, "w1", 22)
    await publish(redis_client, CHAIN[:3], (0, 11), (1, 22))
    await publish(redis_client, CHAIN[3:5], (1, 22))
    assert (await index.lookup(CHAIN[:10])).hits == {"w0": 3, "w1": 5}
    assert index.connected


async def test_a_chain_of_several_windows_is_followed_to_its_end(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:250], (0, 11))
    assert (await index.lookup(CHAIN)).hits == {"w0": 250}


async def test_asking_stops_at_the_window_with_a_hole(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:20], (0, 11))
    await index.lookup(CHAIN)
    before = (await redis_client.info("stats"))["keyspace_misses"]
    await index.lookup(CHAIN)
    after = (await redis_client.info("stats"))["keyspace_misses"]
    assert after - before == 32 - 20


async def test_a_known_worker_without_a_hit_is_an_answer(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:1], (0, 11))
    await index.lookup(CHAIN[:1])
    assert (await index.lookup(CHAIN[100:101])).hits == {}


async def test_an_empty_index_names_no_worker_and_has_answered(index: RedisPrefixIndex) -> None:
    found = await index.lookup(CHAIN[:1])
    assert (found.hits, found.words, found.answered) == (None, "empty", True)
    assert index.connected


async def test_entries_of_a_dead_generation_do_not_count(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 12)
    await publish(redis_client, CHAIN[:2], (0, 11))
    assert (await index.lookup(CHAIN[:2])).hits == {}


async def test_a_new_generation_counts_at_once(
    index: RedisPrefixIndex, redis_client: Redis, clock: ManualClock
) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:2], (0, 11))
    await index.lookup(CHAIN[:2])
    await own(redis_client, 0, "w0", 12)
    await publish(redis_client, CHAIN[:2], (0, 12))
    clock.advance(OWNER_SECONDS / 2)
    assert (await index.lookup(CHAIN[:2])).hits == {"w0": 2}


async def test_an_old_generation_is_believed_for_a_second_at_most(
    index: RedisPrefixIndex, redis_client: Redis, clock: ManualClock
) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:2], (0, 11))
    await index.lookup(CHAIN[:2])
    await own(redis_client, 0, "w0", 12)
    clock.advance(OWNER_SECONDS)
    assert (await index.lookup(CHAIN[:2])).hits == {}


async def test_a_wiped_index_stops_being_an_answer(
    index: RedisPrefixIndex, redis_client: Redis, clock: ManualClock
) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:2], (0, 11))
    await index.lookup(CHAIN[:2])
    await redis_client.flushall()
    clock.advance(OWNER_SECONDS)
    found = await index.lookup(CHAIN[:2])
    assert (found.hits, found.words, found.answered) == (None, "lost", False)


async def test_without_a_model_nothing_is_asked(redis_url: str, clock: ManualClock, redis_client: Redis) -> None:
    await redis_client.config_resetstat()
    unknown = PoolIdentity("", "t" * 32, 16, IDENTITY.kv_geometry)
    async with open_redis(redis_url, PATIENT_S) as client:
        assert (await RedisPrefixIndex(client, KnownRouter(unknown), clock, PATIENT_S).lookup(CHAIN[:1])).hits is None
    assert (await redis_client.info("commandstats")).get("cmdstat_eval_ro") is None


async def test_a_redis_that_is_down_is_left_alone_and_used_again_when_it_is_back(clock: ManualClock) -> None:
    server = await asyncio.to_thread(_started)
    client = open_redis(server.url, PATIENT_S)
    breaker, came = CircuitBreaker(PAUSES.pause, threshold=2), list[str]()
    index = RedisPrefixIndex(client, KnownRouter(IDENTITY), clock, PATIENT_S, breaker, came.append)
    try:
        await own(client, 0, "w0", 11)
        await publish(client, CHAIN[:2], (0, 11))
        assert (await index.lookup(CHAIN[:2])).hits == {"w0": 2}
        server.kill()
        assert (await index.lookup(CHAIN[:2])).words == "failed: it could not be reached"
        clock.advance(0.5)
        assert (await index.lookup(CHAIN[:2])).hits is None
        assert not index.connected
        await asyncio.to_thread(server.start)
        await own(client, 0, "w0", 11)
        await publish(client, CHAIN[:2], (0, 11))
        why = "2 look-ups in a row failed in the 500 ms before, the last one: it could not be reached"
        assert (await index.lookup(CHAIN[:2])).words == f"skipped: {why}"  # the breaker is open
        clock.advance(1.0)
        assert (await index.lookup(CHAIN[:2])).hits == {"w0": 2}
        assert index.connected
        assert came == ["answered", "failed", "failed", "skipped", "answered"]
    finally:
        await client.aclose()
        server.stop()


async def test_a_redis_that_does_not_answer_costs_its_timeout_and_no_more(clock: ManualClock) -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Listener(never_answer) as listener:
        client = open_redis(f"redis://127.0.0.1:{listener.port}", 0.02)
        index = RedisPrefixIndex(client, KnownRouter(IDENTITY), clock, 0.02, CircuitBreaker(PAUSES.pause, threshold=1))
        began = asyncio.get_running_loop().time()
        assert (await index.lookup(CHAIN[:1])).words == "late: 20 ms"
        assert asyncio.get_running_loop().time() - began < PATIENT_S
        assert not index.connected
        await client.aclose()


class _SlowRedis(Redis):
    """Takes six seconds of a clock for each answer, and counts the keys of each script."""

    clock: ManualClock
    asked: list[int]

    async def eval_ro(self, script: str, numkeys: int, *arguments: str | bytes) -> object:  # type: ignore[override]
        answer = await super().eval_ro(script, numkeys, *arguments)
        self.clock.advance(6.0)
        self.asked.append(numkeys)
        return answer


@pytest.fixture
async def slow(redis_url: str, clock: ManualClock) -> AsyncIterator[_SlowRedis]:
    client = cast("_SlowRedis", _SlowRedis.from_url(redis_url))
    client.clock, client.asked = clock, []
    yield client
    await client.aclose()


@pytest.mark.parametrize(("window", "hits"), [(0, {"w0": 32}), (32, {"w0": 1}), (16, {"w0": 512})])
async def test_a_lookup_ends_at_its_limit_with_what_is_known_and_is_no_failure(
    slow: _SlowRedis, redis_client: Redis, clock: ManualClock, window: int, hits: dict[str, int]
) -> None:
    """One long prompt after the other would else open the breaker for everybody."""
    identity = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, window=window))
    came, chain = list[str](), [BlockHash(number.to_bytes(16, "big")) for number in range(8192)]
    index = RedisPrefixIndex(slow, KnownRouter(identity), clock, 10.0, count=came.append)
    root = prefix_key_root(identity.namespace)
    owner = SlotOwner("w0", "00", "127.0.0.1:1", 11)
    await redis_client.hset(slot_key(identity.namespace, 0), mapping=asdict(owner))  # type: ignore[arg-type]
    await redis_client.mset({root + block: pack_entry(0, 11) for block in chain})
    await index.lookup(chain[:1])
    slow.asked.clear()
    for _ in range(4):
        clock.advance(OWNER_SECONDS)
        assert (await index.lookup(chain)).hits == hits
    assert came == ["answered", *["cut"] * 4]
    assert len(slow.asked) == 8, "two answers of six seconds each exceed the limit of ten"
    assert index.connected


async def test_where_every_layer_has_a_window_few_keys_are_read(
    slow: _SlowRedis, redis_client: Redis, clock: ManualClock
) -> None:
    """A window of 4,096 slots covers 256 blocks: 32k tokens need 8 keys, or the blocks around the deepest hit."""
    identity = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, window=4096))
    index = RedisPrefixIndex(slow, KnownRouter(identity), clock, 1000.0)
    chain = [BlockHash(number.to_bytes(16, "big")) for number in range(2048)]
    assert (await index.lookup(chain)).hits is None
    assert slow.asked == [8]
    owner = SlotOwner("w0", "00", "127.0.0.1:1", 11)
    await redis_client.hset(slot_key(identity.namespace, 0), mapping=asdict(owner))  # type: ignore[arg-type]
    root = prefix_key_root(identity.namespace)
    await redis_client.mset({root + block: pack_entry(0, 11) for block in chain})
    slow.asked.clear()
    assert (await index.lookup(chain)).hits == {"w0": 2048}
    assert slow.asked == [8, 1, 510], "nothing is read twice for a new owner"


@pytest.mark.parametrize("window", [0, 16])
async def test_hits_of_known_owners_stay_when_the_limit_comes_with_a_new_owner(
    slow: _SlowRedis, redis_client: Redis, clock: ManualClock, window: int
) -> None:
    identity = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, window=window))
    index = RedisPrefixIndex(slow, KnownRouter(identity), clock, 10.0)
    root, chain = prefix_key_root(identity.namespace), CHAIN[:20]
    for slot in (0, 1):
        owner = SlotOwner(f"w{slot}", "00", "127.0.0.1:1", 11)
        await redis_client.hset(slot_key(identity.namespace, slot), mapping=asdict(owner))  # type: ignore[arg-type]
    await redis_client.mset({root + block: pack_entry(0, 11) for block in chain})
    await index.lookup(chain[:1])
    await redis_client.mset({root + block: pack_entry(0, 11) + pack_entry(1, 11) for block in chain})
    slow.asked.clear()
    assert (await index.lookup(chain)).hits == {"w0": 20, "w1": 20}
    assert slow.asked == [20, 1]


@pytest.mark.parametrize(("window", "hits"), [(0, {"w0": 32}), (16, {"w0": 512})])
async def test_an_answer_that_does_not_come_leaves_the_hits_before_it(
    redis_url: str, redis_client: Redis, clock: ManualClock, window: int, hits: dict[str, int]
) -> None:
    """The timer of the event loop ends the wait, after answers that came in time."""
    identity = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, window=window))
    came, chain = list[str](), [BlockHash(number.to_bytes(16, "big")) for number in range(600)]

    class Silent(Redis):
        answers = 3

        async def eval_ro(self, script: str, numkeys: int, *arguments: str | bytes) -> object:  # type: ignore[override]
            if not self.answers:
                await asyncio.Event().wait()
            self.answers -= 1
            if not self.answers:
                # The next answer has a hundredth of a second; the ones before it had any time.
                clock.advance(599.99)
            return await super().eval_ro(script, numkeys, *arguments)

    root, owner = prefix_key_root(identity.namespace), SlotOwner("w0", "00", "127.0.0.1:1", 11)
    await redis_client.hset(slot_key(identity.namespace, 0), mapping=asdict(owner))  # type: ignore[arg-type]
    await redis_client.mset({root + block: pack_entry(0, 11) for block in chain})
    client = cast("Silent", Silent.from_url(redis_url))
    index = RedisPrefixIndex(client, KnownRouter(identity), clock, 600.0, count=came.append)
    try:
        await index.lookup(chain[:1])
        client.answers = 1
        assert (await index.lookup(chain)).hits == hits
        assert came == ["answered", "cut"]
        assert index.connected
    finally:
        await client.aclose()


async def test_half_an_answer_is_a_failure(redis_url: str, clock: ManualClock) -> None:
    class HalfRedis(Redis):
        async def eval_ro(self, script: str, numkeys: int, *arguments: str | bytes) -> object:  # type: ignore[override]
            answers = await super().eval_ro(script, numkeys, *arguments)
            assert isinstance(answers, list)
            return answers[: numkeys // 2]

    client, came = HalfRedis.from_url(redis_url), list[str]()
    index = RedisPrefixIndex(client, KnownRouter(IDENTITY), clock, PATIENT_S, count=came.append)
    try:
        assert (await index.lookup(CHAIN[:4])).words == "failed: it answered with an error"
        assert came == ["failed"]
    finally:
        await client.aclose()


async def test_a_huge_value_counts_to_its_limit_and_takes_no_memory(
    index: RedisPrefixIndex, redis_client: Redis
) -> None:
    """Whoever can write Redis could else take the router's memory: a value may have 512 MB, a lookup asks for 512."""
    await own(redis_client, 0, "w0", 11)
    await own(redis_client, 1, "w1", 22)
    first, huge = pack_entry(0, 11), 32 << 20
    beyond = MAX_INDEX_VALUE_BYTES // len(first) * first + pack_entry(1, 22)
    await redis_client.set(prefix_key_root(NAMESPACE) + CHAIN[0], beyond)
    await redis_client.set(prefix_key_root(NAMESPACE) + CHAIN[1], first * (huge // len(first)))
    await publish(redis_client, CHAIN[2:3], (0, 11))
    tracemalloc.start()
    try:
        assert (await index.lookup(CHAIN[:3])).hits == {"w0": 3}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


async def test_an_owner_with_a_huge_field_is_none(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 11)
    await redis_client.hset(slot_key(NAMESPACE, 1), mapping={"worker_id": "w" * (1 << 20), "generation": "22"})
    await redis_client.set(slot_key(NAMESPACE, 2), "no hash")
    await publish(redis_client, CHAIN[:2], (0, 11), (1, 22), (2, 33))
    assert (await index.lookup(CHAIN[:2])).hits == {"w0": 2}


async def test_a_key_of_another_type_is_a_hole(index: RedisPrefixIndex, redis_client: Redis) -> None:
    await own(redis_client, 0, "w0", 11)
    await publish(redis_client, CHAIN[:3], (0, 11))
    await redis_client.delete(prefix_key_root(NAMESPACE) + CHAIN[1])
    await redis_client.rpush(prefix_key_root(NAMESPACE) + CHAIN[1], "a")
    assert (await index.lookup(CHAIN[:3])).hits == {"w0": 1}


async def test_without_redis_there_is_no_answer() -> None:
    index = NoPrefixIndex()
    assert (await index.lookup(CHAIN[:1])).words == "off"
    assert not index.connected


async def test_a_busy_event_loop_does_not_lengthen_a_look_up(clock: ManualClock) -> None:
    """The loop looks at the limit of 20 ms after 3 s."""

    class LateRedis(Redis):
        async def eval_ro(self, script: str, numkeys: int, *arguments: str | bytes) -> object:  # type: ignore[override]
            clock.advance(3.0)
            raise TimeoutError

    async with LateRedis() as client:
        found = await RedisPrefixIndex(client, KnownRouter(IDENTITY), clock, 0.02).lookup(CHAIN[:1])
    assert (found.words, found.seconds) == ("late: 20 ms", 0.02)


def _started() -> LocalRedis:
    server = LocalRedis()
    server.start()
    return server


_FULL = KvGroup(KvGroupKind.FULL, 0, 1, (0,))


@pytest.mark.parametrize(
    "shape",
    [
        {"window": 32},
        {"groups": (_FULL, KvGroup(KvGroupKind.WINDOW, 32, 3, (1,)))},
        {"groups": (_FULL, KvGroup(KvGroupKind.WINDOW, 16, 1, (1,)), KvGroup(KvGroupKind.WINDOW, 32, 1, (2,)))},
    ],
)
async def test_where_layers_have_windows_hits_need_no_first_blocks(
    redis_url: str, redis_client: Redis, clock: ManualClock, shape: dict[str, Any]
) -> None:
    """A window of 32 slots covers two blocks of 16; the index is read to its end, beyond windows without any hit."""
    client = open_redis(redis_url, PATIENT_S)
    windowed = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, **shape))
    index = RedisPrefixIndex(client, KnownRouter(windowed), clock, PATIENT_S)
    try:
        root = prefix_key_root(windowed.namespace)
        for slot, generation in ((0, 11), (1, 22)):
            owner = SlotOwner(f"w{slot}", "00", "127.0.0.1:1", generation)
            await redis_client.hset(slot_key(windowed.namespace, slot), mapping=asdict(owner))  # type: ignore[arg-type]
        held = {at: pack_entry(0, 11) for at in (198, 199)} | {at: pack_entry(1, 22) for at in (0, 7, 8, 298)}
        await redis_client.mset({root + CHAIN[at]: value for at, value in held.items()})
        assert (await index.lookup(CHAIN)).hits == {"w0": 200, "w1": 9}
    finally:
        await client.aclose()
