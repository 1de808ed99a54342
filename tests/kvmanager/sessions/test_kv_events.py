"""Subscriptions to the prefix caches' changes: snapshots, positions, gaps, sessions that end, slow subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.contracts.errors import Overloaded, Unavailable
from common.contracts.lease import Attach
from common.contracts.types import BlockHash
from kvmanager.contracts.index_events import IndexEvent, IndexSnapshot, Stored
from kvmanager.sessions.kv_events import Changes, KvEventHub, KvItem, Left, Position, SnapshotPart, stream_of
from tests.support.kvmanager.fake_session import attach_of

PATIENCE_S = 120.0


def stored(number: int) -> Stored:
    return Stored(number, BlockHash(number.to_bytes(16, "big")), number - 1)


class Cache:
    """A worker's membership, one chain of blocks, and its events."""

    def __init__(self, hub: KvEventHub, attach: Attach | None = None) -> None:
        self.hub, self.attach, self.events = hub, attach or attach_of(), list[IndexEvent]()
        hub.attached(self.attach, self.snapshot)

    def snapshot(self) -> IndexSnapshot:
        entries = tuple((each.hash, each.depth) for each in self.events if isinstance(each, Stored))
        return IndexSnapshot(len(self.events), entries)

    def store(self, count: int = 1) -> None:
        """Store blocks; subscribers hear of them together."""
        fresh = [stored(len(self.events) + n) for n in range(1, count + 1)]
        self.events += fresh
        self.hub.changed(self.attach.worker_id, fresh)

    @property
    def stream(self) -> str:
        return stream_of(self.attach)


async def take(items: AsyncIterator[KvItem], count: int) -> list[KvItem]:
    async with asyncio.timeout(PATIENCE_S):
        return [await anext(items) for _ in range(count)]


async def test_a_snapshot_comes_first_and_then_every_change_once() -> None:
    hub = KvEventHub()
    cache = Cache(hub)
    cache.store(2)
    subscription = hub.subscribe("", {})
    cache.store()  # before the snapshot is made: the snapshot has it, and it is not sent again
    items = subscription.items()
    (first,) = await take(items, 1)
    entries = tuple((stored(n).hash, n - 1) for n in (1, 2, 3))
    assert first == SnapshotPart("w0", Position(cache.stream, 3), entries, "first", last=True)
    cache.store(2)
    assert await take(items, 1) == [Changes("w0", Position(cache.stream, 5), (stored(4), stored(5)))]


def hub_with_a_past_subscriber() -> KvEventHub:
    hub = KvEventHub()
    hub.unsubscribe(hub.subscribe("", {}))
    return hub


async def test_events_from_before_the_first_subscriber_are_in_its_snapshot_alone() -> None:
    hub = KvEventHub()
    cache = Cache(hub)
    cache.store(5)
    items = hub.subscribe("", {"w0": Position(cache.stream, 3)}).items()
    (first,) = await take(items, 1)
    assert isinstance(first, SnapshotPart)
    assert (first.at, len(first.entries), first.reason) == (Position(cache.stream, 5), 5, "gap")
    cache.store()
    assert await take(items, 1) == [Changes("w0", Position(cache.stream, 6), (stored(6),))]


async def test_a_subscriber_goes_on_after_a_number() -> None:
    hub = hub_with_a_past_subscriber()
    cache = Cache(hub)
    cache.store(5)
    items = hub.subscribe("", {"w0": Position(cache.stream, 3)}).items()
    assert await take(items, 1) == [Changes("w0", Position(cache.stream, 5), (stored(4), stored(5)))]
    cache.store()
    assert await take(items, 1) == [Changes("w0", Position(cache.stream, 6), (stored(6),))]


@pytest.mark.parametrize(("number", "same", "reason"), [(0, True, "gap"), (99, True, "gap"), (3, False, "attached")])
async def test_what_is_not_known_any_more_is_a_snapshot_with_the_reason(number: int, same: bool, reason: str) -> None:
    hub = KvEventHub()
    cache = Cache(hub)
    cache.store(5000)  # more than the log keeps
    position = Position(cache.stream if same else "another session", number)
    items = hub.subscribe("", {"w0": position}).items()
    parts = await take(items, 2)
    assert [part.reason for part in parts if isinstance(part, SnapshotPart)] == [reason, reason]
    assert [part.last for part in parts if isinstance(part, SnapshotPart)] == [False, True]
    assert sum(len(part.entries) for part in parts if isinstance(part, SnapshotPart)) == 5000


async def test_a_session_that_ends_and_its_successor_are_told() -> None:
    hub = KvEventHub()
    cache = Cache(hub)
    items = hub.subscribe("", {}).items()
    await take(items, 1)
    cache.store()
    hub.left(cache.attach)
    later = Cache(hub, attach_of(session=2))
    hub.left(cache.attach)  # late, and of a session that is over: nothing
    later.store()
    news, gone, snapshot = await take(items, 3)
    assert (news, gone) == (
        Changes("w0", Position(cache.stream, 1), (stored(1),)),
        Left("w0", Position(cache.stream, 1)),
    )
    assert isinstance(snapshot, SnapshotPart)
    assert (snapshot.at, snapshot.reason) == (Position(later.stream, 1), "attached")
    assert cache.stream != later.stream


async def test_one_worker_may_be_asked_for() -> None:
    hub = KvEventHub()
    first, second = Cache(hub), Cache(hub, attach_of("w1"))
    items = hub.subscribe("w1", {}).items()
    first.store()
    second.store()
    (snapshot,) = await take(items, 1)
    assert snapshot.worker_id == "w1"
    second.store()
    assert [each.worker_id for each in await take(items, 1)] == ["w1"]


async def test_a_slow_subscriber_is_ended_with_the_reason_and_the_others_go_on() -> None:
    hub = KvEventHub(most_changes=10)
    cache = Cache(hub)
    slow, quick = hub.subscribe("", {}), hub.subscribe("", {})
    quick_items, slow_items = quick.items(), slow.items()
    await take(quick_items, 1)
    await take(slow_items, 1)
    for _ in range(3):
        cache.store(4)
        await take(quick_items, 1)
    with pytest.raises(Overloaded, match="more than 10 changes wait for it"):
        await take(slow_items, 1)
    cache.store(4)
    assert len(slow._queue) == 0, "what an ended subscription would get is not kept"
    assert len(await take(quick_items, 1)) == 1


async def test_snapshots_that_wait_hold_no_memory() -> None:
    hub = KvEventHub()
    asked: list[int] = []
    subscription = hub.subscribe("", {})
    for session in range(1, 4):
        attach = attach_of(session=session)

        def snapshot(number: int = session) -> IndexSnapshot:
            asked.append(number)
            return IndexSnapshot(0, ())

        hub.attached(attach, snapshot)
        if session < 3:
            hub.left(attach)
    found = await take(subscription.items(), 3)
    assert asked == [3], "only the session that lives has one"
    assert [type(each) for each in found] == [Left, Left, SnapshotPart]


async def test_too_many_subscribers_are_refused_and_places_come_back() -> None:
    hub = KvEventHub(most_subscribers=1)
    first = hub.subscribe("", {})
    with pytest.raises(Overloaded, match="there are 1 already"):
        hub.subscribe("", {})
    hub.unsubscribe(first)
    hub.subscribe("", {})


async def test_the_end_of_the_manager_ends_subscriptions() -> None:
    hub = KvEventHub()
    items = hub.subscribe("", {}).items()
    hub.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await take(items, 1)
