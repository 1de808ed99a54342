"""Passes changes of the prefix caches on to subscribers: a snapshot first, or what came since a position.

A subscriber's queue holds changes up to a bound, and of a snapshot only the order to make one. A subscriber that does
not keep up loses its subscription, with the reason, and may come back with its positions. Nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from common.contracts.errors import Overloaded, QuireError, QuotaViolation, Unavailable
from common.contracts.lease import Attach, public_incarnation
from common.contracts.types import BlockHash
from kvmanager.contracts.index_events import IndexEvent, IndexSnapshot
from kvmanager.sessions.event_log import EventLog

QUEUED_CHANGES: Final = 65_536
SUBSCRIBERS: Final = 32
# Entries or changes in a message: some 100 KB at most.
_A_MESSAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Position:
    """The last event that a subscriber has of a worker. `stream` names the session whose events are counted."""

    stream: str
    number: int


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Some entries (hash, depth) of a snapshot, parents first; `reason` says why there is one."""

    worker_id: str
    at: Position
    entries: tuple[tuple[BlockHash, int], ...]
    reason: str
    last: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """Events in their order, up to the position."""

    worker_id: str
    at: Position
    events: tuple[IndexEvent, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """The worker is not attached any more."""

    worker_id: str
    at: Position


T = TypeVar("T")
KvItem = SnapshotPart | Changes | Left


@dataclass(frozen=True, slots=True)
class _SnapshotDue:
    """The order to make a snapshot when the subscriber has taken everything before it."""

    source: _Source
    reason: str


@dataclass(slots=True)
class _Source:
    """One session of a worker."""

    worker_id: str
    stream: str
    snapshot: Callable[[], IndexSnapshot]
    log: EventLog = field(default_factory=EventLog)
    live: bool = True


class Subscription:
    """The queue of one subscriber; iterate over `items` once."""

    def __init__(self, worker_id: str, most: int) -> None:
        self.worker_id, self._most = worker_id, most
        self._queue: deque[_SnapshotDue | Changes | Left] = deque()
        self._changes = 0
        self._wake = asyncio.Event()
        self._positions: dict[str, Position] = {}
        self._failure: QuireError | None = None

    def wants(self, worker_id: str) -> bool:
        return self.worker_id in ("", worker_id)

    def begin(self, source: _Source, after: Position | None) -> None:
        """Queue what came after a position, or a snapshot where that is not known any more."""
        missed = source.log.since(after.number) if after is not None and after.stream == source.stream else None
        if after is None or missed is None:
            there = after is not None and after.stream == source.stream
            self.put_item(_SnapshotDue(source, "gap" if there else "first" if after is None else "attached"))
            return
        self._positions[source.worker_id] = after
        if missed:
            self.put_item(Changes(source.worker_id, Position(source.stream, source.log.number), missed))

    def put_item(self, item: _SnapshotDue | Changes | Left) -> None:
        """Queue an item; end the subscription when too many changes wait."""
        self._changes += len(item.events) if isinstance(item, Changes) else 1
        self._queue.append(item)
        self._wake.set()
        if self._changes > self._most:
            what = f"more than {self._most} changes wait for it; subscribe again after the last number that came"
            self.end_with(Overloaded(QuotaViolation("subscriber is too slow", what), 1.0))

    def end_with(self, failure: QuireError) -> None:
        """Drop what waits; `items` raises the failure."""
        self._failure = failure
        self._queue.clear()
        self._wake.set()

    @property
    def ended(self) -> bool:
        return self._failure is not None

    async def items(self) -> AsyncIterator[KvItem]:
        """Yield for ever. Raises Overloaded when the subscriber was too slow, Unavailable at the manager's end."""
        while self._failure is None:
            while self._queue:
                item = self._queue.popleft()
                self._changes -= len(item.events) if isinstance(item, Changes) else 1
                for part in self._parts(item):
                    if self._failure is not None:
                        raise self._failure
                    yield part
            self._wake.clear()
            if not self._queue and self._failure is None:
                await self._wake.wait()
        raise self._failure

    def _parts(self, item: _SnapshotDue | Changes | Left) -> Iterator[KvItem]:
        match item:
            case _SnapshotDue(source, reason):
                yield from self._snapshot(source, reason) if source.live else ()
            case Changes():
                yield from self._news(item)
            case Left():
                self._positions.pop(item.worker_id, None)
                yield item

    def _snapshot(self, source: _Source, reason: str) -> Iterator[SnapshotPart]:
        taken = source.snapshot()
        at = self._positions[source.worker_id] = Position(source.stream, taken.number)
        parts = _slices(taken.entries) or [()]
        for index, part in enumerate(parts, start=1):
            yield SnapshotPart(source.worker_id, at, part, reason, last=index == len(parts))

    def _news(self, item: Changes) -> Iterator[Changes]:
        """Yield the events that no snapshot contained. A snapshot that is made late has some that wait here."""
        at = self._positions.get(item.worker_id)
        if at is None or at.stream != item.at.stream:
            return  # the session ended before its snapshot was made
        events = tuple(event for event in item.events if event.number > at.number)
        for part in _slices(events):
            position = self._positions[item.worker_id] = Position(at.stream, part[-1].number)
            yield Changes(item.worker_id, position, part)


class KvEventHub:
    """The sessions of all workers, and who wants to know of them. A clock-free object of the event loop."""

    def __init__(self, most_changes: int = QUEUED_CHANGES, most_subscribers: int = SUBSCRIBERS) -> None:
        self._most_changes, self._most_subscribers = most_changes, most_subscribers
        self._sources: dict[str, _Source] = {}
        self._subscriptions: set[Subscription] = set()
        # Without a subscriber nobody has a position to come back with, so no event is kept.
        self._ever_subscribed = False

    def subscribe(self, worker_id: str, after: Mapping[str, Position]) -> Subscription:
        """Return the queue of a new subscriber; `unsubscribe` it. Raises Overloaded when there are too many."""
        if len(self._subscriptions) >= self._most_subscribers:
            what = f"there are {self._most_subscribers} already, which is the most"
            raise Overloaded(QuotaViolation("subscribers to KV events", what), 10.0)
        self._ever_subscribed = True
        subscription = Subscription(worker_id, self._most_changes)
        self._subscriptions.add(subscription)
        for source in self._sources.values():
            if subscription.wants(source.worker_id):
                subscription.begin(source, after.get(source.worker_id))
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def close(self, why: str = "the KV manager is shutting down; subscribe again to the next one") -> None:
        """End every subscription: the manager goes away, or leads no more."""
        for subscription in tuple(self._subscriptions):
            subscription.end_with(Unavailable(why))
        self._subscriptions.clear()

    # ------------------------------------------------------------ sessions

    def attached(self, attach: Attach, snapshot: Callable[[], IndexSnapshot]) -> None:
        """Begin a worker's stream of events: subscribers get its membership as a whole."""
        source = _Source(attach.worker_id, stream_of(attach), snapshot)
        self._sources[attach.worker_id] = source
        self._tell(attach.worker_id, _SnapshotDue(source, "attached"))

    def changed(self, worker_id: str, events: Sequence[IndexEvent]) -> None:
        """Pass on the events of an attached worker, in their order; there is one at least."""
        source = self._sources[worker_id]
        if not self._ever_subscribed:
            source.log.pass_over(events[-1].number)
            return
        source.log.add(events)
        if not self._subscriptions:
            return
        at = Position(source.stream, source.log.number)
        self._tell(worker_id, Changes(worker_id, at, tuple(events)))

    def left(self, attach: Attach) -> None:
        """End a session's stream of events; nothing when the worker has another session already."""
        source = self._sources.get(attach.worker_id)
        if source is None or source.stream != stream_of(attach):
            return
        del self._sources[attach.worker_id]
        source.live = False
        self._tell(attach.worker_id, Left(attach.worker_id, Position(source.stream, source.log.number)))

    def _tell(self, worker_id: str, item: _SnapshotDue | Changes | Left) -> None:
        for subscription in tuple(self._subscriptions):
            if subscription.wants(worker_id):
                subscription.put_item(item)
                if subscription.ended:
                    self._subscriptions.discard(subscription)


def stream_of(attach: Attach) -> str:
    """Return the public name of a session; the incarnation itself is the worker's secret."""
    return f"{public_incarnation(attach.incarnation).hex()[:16]}-{attach.session}"


def _slices(items: Sequence[T]) -> list[tuple[T, ...]]:
    return [tuple(items[at : at + _A_MESSAGE]) for at in range(0, len(items), _A_MESSAGE)]
