"""The lease of a group in a real Redis: it follows the rules of the core, and an old term takes no epoch."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.errors import StaleEpoch
from common.contracts.lease import highest_plausible_epoch
from common.contracts.limits import MAX_FOREIGN_EPOCH
from common.process.redis_client import open_redis
from common.process.redis_users import RedisUsers
from kvmanager.contracts.ports import IndexUnavailable
from kvmanager.group.group_lease import RedisGroupLease
from kvmanager.group.leadership import Attempt, Lease, granted
from kvmanager.index.store import TIMEOUT_S, RedisIndexStore

LEASE, TERM = index_format.group_keys("g")
NAMESPACE, CLOCK = "{quire:m:t:16}", 500
FAR = highest_plausible_epoch(0) + 1


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


def lease_of(stack: AsyncExitStack, url: str, owner: str = "own") -> RedisGroupLease:
    lease = RedisGroupLease(open_redis(url, TIMEOUT_S), "g", owner, lambda: CLOCK)
    stack.push_async_callback(lease.close)
    return lease


def text_of(lease: Lease) -> str:
    return f"{lease.term} {lease.renewal} {lease.owner} {lease.address} {lease.namespace}"


@pytest.mark.parametrize("counter", [None, 0, 4, 9, FAR])
@pytest.mark.parametrize("held", [None, Lease(4, "own", "h:1"), Lease(4, "other", "h:1", NAMESPACE, 6)])
async def test_redis_grants_by_the_rules_of_the_core(
    held: Lease | None, counter: int | None, stack: AsyncExitStack, redis_url: str, redis_client: Redis
) -> None:
    lease = lease_of(stack, redis_url)
    tries = itertools.product((0, 4), (0, 4, 12), (None, (4, 6), (4, 5), (5, 6)))
    for number, (term, least, seize) in enumerate(tries, start=1):
        await redis_client.flushall()
        if counter is not None:
            await redis_client.set(TERM, counter)
        if held is not None:
            await redis_client.set(LEASE, text_of(held))
        attempt = Attempt(term, least, seize)
        expected = granted(held, counter, "own", attempt, CLOCK)
        found = await lease.hold(attempt, "me:2", "ns")
        assert found == (held if expected is None else expected)
        if expected is not None:
            assert await redis_client.get(LEASE) == text_of(Lease(expected, "own", "me:2", "ns", number)).encode()
            assert await redis_client.pttl(LEASE) == -1, "a full Redis evicts keys that have a TTL"


async def test_a_clock_that_is_far_ahead_gives_a_term_that_others_believe(
    stack: AsyncExitStack, redis_url: str
) -> None:
    ahead = RedisGroupLease(open_redis(redis_url, TIMEOUT_S), "g", "ahead", lambda: 1e12)
    stack.push_async_callback(ahead.close)
    term = await ahead.hold(Attempt(0, 0), "a:1", "")
    seen = await lease_of(stack, redis_url).hold(Attempt(0, 0), "b:1", "")
    assert (term, seen) == (MAX_FOREIGN_EPOCH, Lease(MAX_FOREIGN_EPOCH, "ahead", "a:1", "", 1))


async def test_what_no_manager_wrote_counts_as_no_lease(
    stack: AsyncExitStack, redis_url: str, redis_client: Redis
) -> None:
    lease = lease_of(stack, redis_url)
    many = b"9" * 400
    for broken in (b"", b"nonsense", b"7 1 other", b"-7 1 other h:1 ", b"%d 1 other h:1 " % FAR, many, b"\xff \xff"):
        await redis_client.set(LEASE, broken)
        await redis_client.set(TERM, 3)
        assert await lease.hold(Attempt(0, 0), "me:2", "") == 4
    await redis_client.set(LEASE, b"7 %s other h:1 " % many)
    assert await lease.hold(Attempt(0, 0), "me:2", "") == 5
    await redis_client.delete(LEASE)
    await redis_client.sadd(LEASE, "a key of another type")
    assert await lease.hold(Attempt(0, 0), "me:2", "") == 6


async def test_a_lease_is_taken_only_with_its_mark_and_is_given_up_by_its_owner_alone(
    stack: AsyncExitStack, redis_url: str, redis_client: Redis
) -> None:
    first, second = lease_of(stack, redis_url, "a"), lease_of(stack, redis_url, "b")
    term = await first.hold(Attempt(0, 0), "a:1", "")
    assert isinstance(term, int)
    seen = await second.hold(Attempt(0, 0), "b:1", "")
    assert seen == Lease(term, "a", "a:1", "", 1)
    await first.hold(Attempt(term, term), "a:1", "")
    seen = await second.hold(Attempt(0, term, seen.mark), "b:1", "")
    assert seen == Lease(term, "a", "a:1", "", 2)
    assert await second.hold(Attempt(0, term, seen.mark), "b:1", "") == term + 1
    await first.resign()
    assert await redis_client.exists(LEASE)
    await second.resign()
    assert not await redis_client.exists(LEASE)


async def test_an_old_term_takes_no_epoch_however_high_and_writes_nothing(
    stack: AsyncExitStack, redis_url: str, redis_client: Redis
) -> None:
    old, new = (
        RedisIndexStore(open_redis(redis_url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 0, term, "g") for term in (4, 5)
    )
    alone = RedisIndexStore(open_redis(redis_url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 0)
    for store in (old, new, alone):
        stack.push_async_callback(store.close)
    first = await old.acquire(1, 0)
    second = await new.acquire(1, 0)
    before = {key: await redis_client.get(key) for key in await redis_client.keys()}
    for least, held in ((1, 0), (1, first), (second + 7, 0)):
        with pytest.raises(StaleEpoch):
            await old.acquire(least, held)
    with pytest.raises(StaleEpoch):
        await old.renew(first, {0: 1}, {})
    assert {key: await redis_client.get(key) for key in await redis_client.keys()} == before
    assert await new.acquire(1, second) == second + 1
    assert await alone.acquire(1, 0) == second + 2  # one outside of any group: another fence, one counter


async def test_a_group_of_another_name_counts_its_own_terms(
    stack: AsyncExitStack, redis_url: str, redis_client: Redis
) -> None:
    last, next_, late = (
        RedisIndexStore(open_redis(redis_url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 0, term, group)
        for term, group in ((40_000, "a"), (12_000, "b"), (39_999, "a"))
    )
    for store in (last, next_, late):
        stack.push_async_callback(store.close)
    first = await last.acquire(1, 0)
    assert await next_.acquire(1, 0) == first + 1
    with pytest.raises(StaleEpoch):
        await late.acquire(1, 0)


async def test_the_managers_user_may_hold_and_resign(
    stack: AsyncExitStack, redis_url: str, redis_client: Redis
) -> None:
    """Deployments keep the rules of Redis that they were made with: the lease needs no further command."""
    acl = next(line for line in RedisUsers().acl().splitlines() if line.startswith("user manager "))
    execute: Any = redis_client.execute_command
    await execute("ACL", "SETUSER", "lessee", *acl.split()[2:], ">secret")
    lease = lease_of(stack, redis_url.replace("redis://", "redis://lessee:secret@"))
    assert await lease.hold(Attempt(0, 0), "me:2", "") == CLOCK
    await lease.resign()
    await execute("ACL", "DELUSER", "lessee")


async def test_redis_that_is_not_there_is_named_unavailable(stack: AsyncExitStack) -> None:
    lease = lease_of(stack, "redis://127.0.0.1:1/0")
    with pytest.raises(IndexUnavailable):
        await lease.hold(Attempt(0, 0), "me:2", "")
