"""A worker that lives over real streams, a manager, a real Redis: in the end the index equals the manager's map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import cast

import pytest
from grpc import aio
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common.contracts import index_format
from common.contracts.errors import StaleEpoch
from common.contracts.types import BlockHash, PoolIdentity
from common.process.local_redis import LocalRedis
from kvmanager.index import publisher as prefix_publisher
from tests.kvmanager.conftest import ChannelTo, Running, Start
from tests.support.kvmanager.fake_session import IDENTITY
from tests.support.kvmanager.index_reader import index_members
from tests.support.kvmanager.remote_fake_worker import DrivenWorker
from tests.support.waiting import until


@pytest.fixture
async def own_redis() -> AsyncIterator[LocalRedis]:
    """A server that the test may kill and start again."""
    with LocalRedis() as server:
        yield server


async def indexed(url: str, worker_id: str = "w0", identity: PoolIdentity = IDENTITY) -> set[BlockHash]:
    """Return the hashes that a router would find for a worker, read key by key."""
    async with Redis.from_url(url) as client:
        for slot in range(8):
            fields = await client.hgetall(index_format.slot_key(identity.namespace, slot))
            owner = index_format.owner_from_fields(cast("dict[bytes, bytes]", fields))
            if owner is not None and owner.worker_id == worker_id:
                return await index_members(client, identity.namespace, slot, owner.generation)
    return set()


def held(manager: Running, worker_id: str = "w0") -> set[BlockHash]:
    snapshot = manager.attachments.manager.ledger(worker_id).index_snapshot()
    return {key for key, _ in snapshot.entries}


async def until_index_equals_map(manager: Running, url: str) -> None:
    """Wait until a router finds what the manager has: a lease of 0.3 s may run out when the machine is busy.

    A router finds nothing where a key is of a wrong type.
    """
    await manager.flushed()

    async def equal() -> bool:
        with suppress(ResponseError):
            return bool(held(manager)) and await indexed(url) == held(manager)
        return False

    await until(equal)


async def assert_index_equals_map(manager: Running, url: str, worker_id: str = "w0") -> None:
    await manager.flushed()
    members = held(manager, worker_id)
    assert members
    assert await indexed(url, worker_id) == members


async def test_index_equals_the_map_when_nothing_waits(
    start_manager: Start, channel_to: ChannelTo, redis_url: str
) -> None:
    manager = await start_manager(redis_url=redis_url)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for turn in range(60):
        await worker.turn()
        if turn % 10 == 9:
            await assert_index_equals_map(manager, redis_url)
    ledger = manager.attachments.manager.ledger("w0")
    assert ledger.pool_counts().totals.evictions > 0
    ledger.check_invariants()
    await worker.finish()
    await assert_index_equals_map(manager, redis_url)
    pool = ledger.pool_counts()
    assert (pool.in_use, pool.leased, pool.waiting, pool.free + pool.cached) == (0, 0, 0, pool.num_blocks)


async def test_two_workers_have_entries_of_their_own(
    start_manager: Start, channel_to: ChannelTo, redis_url: str
) -> None:
    manager = await start_manager(redis_url=redis_url)
    workers = [DrivenWorker(f"w{index}", seed=index) for index in range(2)]
    for worker in workers:
        await worker.attach(channel_to(manager.address))
    for _ in range(20):
        await asyncio.gather(*(worker.turn() for worker in workers))
    for worker_id in ("w0", "w1"):
        await assert_index_equals_map(manager, redis_url, worker_id)


async def test_manager_that_is_restarted_publishes_the_inventory(
    start_manager: Start, channel_to: ChannelTo, redis_url: str
) -> None:
    first = await start_manager(redis_url=redis_url)
    worker = DrivenWorker()
    await worker.attach(channel_to(first.address))
    for _ in range(20):
        await worker.turn()
    before = worker.epoch
    await first.process.abort()
    second = await start_manager(redis_url=redis_url)
    await worker.attach(channel_to(second.address))
    assert worker.epoch == before + 1
    await assert_index_equals_map(second, redis_url)
    for _ in range(20):
        await worker.turn()
    await assert_index_equals_map(second, redis_url)


async def test_wiped_redis_is_filled_again_under_a_higher_epoch(
    start_manager: Start, channel_to: ChannelTo, redis_url: str, redis_client: Redis
) -> None:
    manager = await start_manager(redis_url=redis_url, lease_ttl=0.3)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for _ in range(20):
        await worker.turn()
    await manager.flushed()
    await redis_client.flushall()
    await worker.turn()
    publisher = manager.process.index.publisher
    assert publisher is not None

    async def published_again() -> bool:
        return publisher.counts.republished >= 2

    await until(published_again)
    await until_index_equals_map(manager, redis_url)
    fence = await redis_client.get(index_format.fence_key(IDENTITY.namespace))
    assert fence is not None
    assert int(fence) > worker.epoch

    async def announced() -> bool:
        return bool(await redis_client.exists(index_format.discovery_key("w0")))

    await until(announced)


async def test_worker_is_served_while_redis_is_away_and_published_after(
    start_manager: Start, channel_to: ChannelTo, own_redis: LocalRedis
) -> None:
    manager = await start_manager(redis_url=own_redis.url)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for _ in range(10):
        await worker.turn()
    await manager.flushed()
    own_redis.kill()
    for _ in range(30):
        await worker.turn()
    assert not await manager.process.index.flush(0.05)
    own_redis.start()  # empty: it was killed
    await assert_index_equals_map(manager, own_redis.url)


async def test_manager_that_starts_without_its_redis_takes_the_fence_later(
    start_manager: Start, channel_to: ChannelTo, own_redis: LocalRedis
) -> None:
    own_redis.kill()
    manager = await start_manager(redis_url=own_redis.url)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for _ in range(10):
        await worker.turn()
    own_redis.start()
    await assert_index_equals_map(manager, own_redis.url)
    assert manager.stale == []


async def test_queue_that_overflows_falls_back_to_publishing_all(
    start_manager: Start, channel_to: ChannelTo, own_redis: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_publisher, "QUEUE_HASHES", 3)
    manager = await start_manager(redis_url=own_redis.url)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    await manager.flushed()
    own_redis.kill()
    publisher = manager.process.index.publisher
    assert publisher is not None
    for _ in range(40):
        await worker.turn()
        assert publisher.behind <= 3 + 1  # a full queue, or the word that everything is to be published
    own_redis.start()
    await assert_index_equals_map(manager, own_redis.url)


async def test_manager_that_was_replaced_learns_it_and_stops_writing(
    start_manager: Start, channel_to: ChannelTo, redis_url: str
) -> None:
    old = await start_manager(redis_url=redis_url)
    new = await start_manager(redis_url=redis_url)
    worker = DrivenWorker("w0")
    await worker.attach(channel_to(old.address))
    other = DrivenWorker("w1", seed=1)
    await other.attach(channel_to(new.address))
    for _ in range(20):
        await worker.turn()
        await other.turn()
    async with asyncio.timeout(60.0):
        while not old.stale:
            await worker.turn()
    assert isinstance(old.stale[0], StaleEpoch)
    await assert_index_equals_map(new, redis_url, "w1")
    assert new.stale == []


async def test_two_managers_do_no_harm_to_blocks(start_manager: Start, channel_to: ChannelTo, redis_url: str) -> None:
    """The worker goes over to the second manager and lives on; it checks content at each read."""
    old = await start_manager(redis_url=redis_url)
    new = await start_manager(redis_url=redis_url)
    worker = DrivenWorker()
    await worker.attach(channel_to(old.address))
    for _ in range(10):
        await worker.turn()
    before = worker.epoch
    await worker.attach(channel_to(new.address))
    assert worker.epoch == before + 1
    for _ in range(20):
        await worker.turn()
    await assert_index_equals_map(new, redis_url)


async def test_worker_that_has_seen_the_second_manager_ends_the_first(
    start_manager: Start, channel_to: ChannelTo, redis_url: str
) -> None:
    old = await start_manager(redis_url=redis_url)
    new = await start_manager(redis_url=redis_url)
    worker = DrivenWorker()
    await worker.attach(channel_to(old.address))
    first = worker.epoch
    await worker.attach(channel_to(new.address))
    words = f"a manager of epoch {first + 1} has taken over from this one, of epoch {first}"
    for _ in range(2):
        with pytest.raises(aio.AioRpcError, match=words):
            await worker.attach(channel_to(old.address))
    assert [str(error) for error in old.stale] == [words]


async def test_worker_that_left_is_retired(
    start_manager: Start, channel_to: ChannelTo, redis_url: str, redis_client: Redis
) -> None:
    manager = await start_manager(redis_url=redis_url, lease_ttl=0.3)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for _ in range(10):
        await worker.turn()
    await until_index_equals_map(manager, redis_url)
    assert worker.stream is not None
    worker.stream.call.cancel()

    async def gone() -> bool:
        return not (await indexed(redis_url, "w0") or await redis_client.exists(index_format.discovery_key("w0")))

    await until(gone)


async def test_after_the_last_worker_another_model_is_served_in_an_index_of_its_own(
    start_manager: Start, channel_to: ChannelTo, redis_url: str
) -> None:
    manager, other = await start_manager(redis_url=redis_url), replace(IDENTITY, model_fingerprint="other" * 6)
    first, second = DrivenWorker(), DrivenWorker("w1", identity=other)
    await first.attach(channel_to(manager.address))
    for _ in range(10):
        await first.turn()
    await assert_index_equals_map(manager, redis_url)
    assert first.stream is not None
    first.stream.call.cancel()
    async with asyncio.timeout(60.0):
        await manager.attachments.left()
    await second.attach(channel_to(manager.address))
    assert second.epoch > first.epoch
    for _ in range(10):
        await second.turn()
    await manager.flushed()
    members = held(manager, "w1")
    assert members
    assert await indexed(redis_url, "w1", other) == members

    async def retired() -> bool:
        return not await indexed(redis_url, "w0")

    await until(retired)  # at once, not when its lease of 5 s is over
    successor = await start_manager(redis_url=redis_url)
    await first.attach(channel_to(successor.address))
    await second.turn()
    await manager.flushed()
    assert not manager.stale, "who serves the first model now is no concern of the manager that has left it"


async def test_entries_are_written_again_before_they_expire(
    start_manager: Start, channel_to: ChannelTo, redis_url: str, redis_client: Redis
) -> None:
    manager = await start_manager(redis_url=redis_url, prefix_ttl=0.9, lease_ttl=0.3)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for _ in range(20):
        await worker.turn()
    await manager.flushed()
    members = held(manager)
    publisher = manager.process.index.publisher
    assert publisher is not None
    written = publisher.counts.added

    async def written_again() -> bool:
        return publisher.counts.added >= written + 3 * len(members)

    await until(written_again)
    await until_index_equals_map(manager, redis_url)
    assert held(manager) == members


async def test_a_publisher_that_ends_by_a_bug_is_begun_again_and_health_says_so(
    start_manager: Start, channel_to: ChannelTo, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unmended manager went on without a publisher, and served as if it had one."""
    manager, worker = await start_manager(redis_url=redis_url), DrivenWorker()
    whole, failures = prefix_publisher.PrefixPublisher._renew, 0

    async def fails_twice(publisher: prefix_publisher.PrefixPublisher, epoch: int) -> None:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise KeyError("a bug")
        await whole(publisher, epoch)

    monkeypatch.setattr(prefix_publisher.PrefixPublisher, "_renew", fails_twice)
    await worker.attach(channel_to(manager.address))
    await until(lambda: manager.process.supervisor.failing == ("prefix-publisher",))
    for _ in range(10):
        await worker.turn()
    async with asyncio.timeout(60.0):
        await assert_index_equals_map(manager, redis_url)
    assert failures > 2


async def is_found(client: Redis, worker: str) -> bool:
    """Return whether routers find a worker: not while the list of all workers is of a wrong type."""
    with suppress(ResponseError):
        return bool(await client.sismember(index_format.DISCOVERY_WORKERS_KEY, worker))
    return False


@pytest.mark.parametrize("kind", ["list", "string", "hash"])
async def test_no_key_of_a_wrong_type_stops_publishing(
    start_manager: Start, channel_to: ChannelTo, redis_url: str, redis_client: Redis, kind: str
) -> None:
    """Whoever may write Redis puts another type in the place of each key in turn, and of the keys of other slots."""
    manager = await start_manager(redis_url=redis_url)
    worker = DrivenWorker()
    await worker.attach(channel_to(manager.address))
    for _ in range(20):
        await worker.turn()
    await until_index_equals_map(manager, redis_url)
    await until(lambda: is_found(redis_client, "w0"))  # workers are announced after they are registered
    others = [index_format.slot_key(IDENTITY.namespace, 1).encode()]
    keys = {*await redis_client.keys("*"), *others}
    for key in sorted(keys, key=lambda key: (b":p:" in key, key)):
        if await redis_client.type(key) == kind.encode():
            continue
        await redis_client.delete(key)
        if kind == "list":
            await redis_client.rpush(key, "x")
        elif kind == "hash":
            await redis_client.hset(key, "a", "b")
        else:
            await redis_client.set(key, "x")
        try:
            for _ in range(3):
                await worker.turn()
            await manager.flushed()
            if b":p:" in key:  # what is lost of a block is published again in half its life; the others go on
                await redis_client.delete(key)
            else:
                await until_index_equals_map(manager, redis_url)
            await until(lambda: is_found(redis_client, "w0"))
        except Exception as error:
            raise AssertionError(f"{kind} in the place of {key!r}") from error
    await worker.finish()
