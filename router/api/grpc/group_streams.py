"""One stream from those of all groups of KV managers.

Each group's stream goes on when the reader has taken its last message: one message of each is held here, and no more. A
stream that ends is opened again, at whichever manager leads the group then; the others go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Final, Generic, Protocol, TypeVar

from common.contracts.errors import QuireError
from common.decisions.pages import gone
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.api.grpc.manager_groups import ManagerGroups

# Seconds until a stream is opened again that has ended, and between two looks for groups that were not known before.
AGAIN_S: Final = 1.0

T = TypeVar("T")
# Of a group: its message, or the error that ended its stream.
_Arrival = tuple[str, T | QuireError]


class Follower(Protocol[T]):
    """What is read of each group, in all its streams."""

    def open(self, group: str) -> AsyncGenerator[T, None]:
        """Yield what a group streams until it ends, by an error."""
        ...

    def passed(self, group: str, message: T) -> bool:
        """Note a message; return whether the reader is to have it."""
        ...

    def ended(self, group: str) -> Sequence[T]:
        """Return what the reader is to be told about a stream that has ended."""
        ...

    def to_reopen(self) -> Sequence[str]:
        """Return the groups whose streams are to begin anew now, each once."""
        ...


class Merged(Generic[T]):
    """The streams of all `groups`, by name. Iterate over `messages` once."""

    def __init__(self, groups: Callable[[], Sequence[str]], follower: Follower[T], again_s: float = AGAIN_S) -> None:
        self._groups, self._follower, self._again_s = groups, follower, again_s
        self._arrivals: asyncio.Queue[_Arrival[T]] = asyncio.Queue(maxsize=1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failing: set[str] = set()

    async def messages(self) -> AsyncGenerator[T, None]:
        """Yield the messages of all groups, also of those that come later. Raises the error of one if none answers."""
        try:
            while True:
                for message in self._changed_groups():
                    yield message
                try:
                    async with asyncio.timeout(self._again_s):
                        group, arrived = await self._arrivals.get()
                except TimeoutError:
                    continue
                for message in self._taken(group, arrived):
                    yield message
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _changed_groups(self) -> Iterator[T]:
        """Follow new groups; leave those whose name was not known before, or that are groups no more."""
        wanted = self._groups()
        for group in wanted:
            if group not in self._tasks:
                self._tasks[group] = asyncio.create_task(self._follow(group))
        for group in self._tasks.keys() - set(wanted):
            self._tasks.pop(group).cancel()
            self._failing.discard(group)
            yield from self._follower.ended(group)

    def _taken(self, group: str, arrived: T | QuireError) -> Iterator[T]:
        if group not in self._tasks:
            return
        if not isinstance(arrived, QuireError):
            self._failing.discard(group)
            if self._follower.passed(group, arrived):
                yield arrived
            yield from self._reopened()
            return
        yield from self._follower.ended(group)
        yield from self._reopened()
        self._failing.add(group)
        if len(self._failing) == len(self._tasks):
            raise arrived

    def _reopened(self) -> Iterator[T]:
        """End streams of which the reader lacks something, and begin them anew."""
        for group in self._follower.to_reopen():
            if group in self._tasks:
                self._tasks.pop(group).cancel()
                yield from self._follower.ended(group)
                self._tasks[group] = asyncio.create_task(self._follow(group))

    async def _follow(self, group: str) -> None:
        while True:
            try:
                async with aclosing(self._follower.open(group)) as messages:
                    async for message in messages:
                        await self._arrivals.put((group, message))
            except QuireError as error:
                await self._arrivals.put((group, error))
            await asyncio.sleep(self._again_s)


class DecisionFollower:
    """The decisions of all groups. A stream that is opened again goes on after the last record that came."""

    def __init__(self, groups: ManagerGroups, request: decision_pb2.WatchDecisionsRequest) -> None:
        self._groups, self._request = groups, request
        self._reached: dict[str, decision_pb2.Position] = {}

    def open(self, group: str) -> AsyncGenerator[decision_pb2.WatchDecisionsResponse, None]:
        asked = decision_pb2.WatchDecisionsRequest()
        asked.CopyFrom(self._request)
        reached = self._reached.get(group)
        if reached is not None:
            del asked.positions[:]
            asked.positions.append(reached)
        return self._groups.stream(
            group, lambda channel: decision_pb2_grpc.DecisionServiceStub(channel).WatchDecisions(asked)
        )

    def passed(self, group: str, message: decision_pb2.WatchDecisionsResponse) -> bool:
        self._reached[group] = message.position
        return True

    def ended(self, group: str) -> Sequence[decision_pb2.WatchDecisionsResponse]:
        reached = self._reached.get(group)
        return [] if reached is None else [gone(reached.source)]

    def to_reopen(self) -> Sequence[str]:
        return ()


class EventFollower:
    """The events of the caches of all groups' workers. A worker has one session, in one group.

    A worker may come to another group before its old group has said that it left. So only a snapshot of a later session
    takes a worker from its group; its changes and its end count from the group that has it. A worker that was detached,
    or whose group's stream ended, is so until a snapshot comes.

    Sessions of two lives of a worker cannot be compared: a late snapshot of the old life takes the worker back. When
    that life ends, the stream of the group that has the new one is opened again, because its snapshot was passed over.
    """

    def __init__(self, groups: ManagerGroups, request: pb.SubscribeKvEventsRequest) -> None:
        self._groups, self._request = groups, request
        # By worker: the group that has its session, and the last message about it.
        self._last: dict[str, tuple[str, pb.SubscribeKvEventsResponse]] = {}
        # Workers of which the reader has an earlier position, until something of them comes. All others begin with a
        # snapshot: workers come under ever new names, and a subscription may last for months.
        self._resumed = {each.worker_id for each in request.after}
        # By worker: the groups that have said that they have it, and not that it left, each with its session.
        self._claims: dict[str, dict[str, str]] = {}
        self._reopen: set[str] = set()

    @property
    def known(self) -> int:
        """The number of workers of which something is kept."""
        return len(self._last.keys() | self._claims.keys() | self._resumed)

    def open(self, group: str) -> AsyncGenerator[pb.SubscribeKvEventsResponse, None]:
        asked = pb.SubscribeKvEventsRequest(worker_id=self._request.worker_id)
        asked.after.extend(each for each in self._request.after if each.worker_id in self._resumed)
        return self._groups.stream(group, lambda channel: rpc.KvManagerServiceStub(channel).SubscribeKvEvents(asked))

    def passed(self, group: str, message: pb.SubscribeKvEventsResponse) -> bool:
        worker = message.worker_id
        known = self._last.get(worker)
        if known is None:
            # Only the first stream of a worker may go on where the reader's earlier subscription ended.
            wanted = message.HasField("snapshot") or worker in self._resumed
        elif known[0] == group:
            wanted = True
        else:
            wanted = message.HasField("snapshot") and _later(message.stream, known[1].stream)
        self._note_claim(group, message)
        if not wanted:
            return False
        self._resumed.discard(worker)
        if not message.HasField("detached"):
            self._last[worker] = group, message
        elif known is not None:
            self._lose(worker)
        return True

    def _note_claim(self, group: str, message: pb.SubscribeKvEventsResponse) -> None:
        """Note which groups have a worker, beside the one whose word counts."""
        if not message.HasField("detached"):
            self._claims.setdefault(message.worker_id, {})[group] = message.stream
        else:
            self._drop_claim(group, message.worker_id)

    def _drop_claim(self, group: str, worker: str) -> None:
        claims = self._claims.get(worker, {})
        claims.pop(group, None)
        if not claims:
            self._claims.pop(worker, None)

    def _lose(self, worker: str) -> None:
        """Forget what the reader has of a worker; a group that has it in another life is to say so again."""
        group, message = self._last.pop(worker)
        claims = self._claims.pop(worker, {})
        self._reopen |= {other for other, stream in claims.items() if other != group and _later(stream, message.stream)}

    def ended(self, group: str) -> Sequence[pb.SubscribeKvEventsResponse]:
        for worker in list(self._claims):
            self._drop_claim(group, worker)
        lost = [message for owner, message in self._last.values() if owner == group]
        for message in lost:
            self._lose(message.worker_id)
        return [
            pb.SubscribeKvEventsResponse(
                worker_id=each.worker_id, stream=each.stream, number=each.number, detached=pb.KvDetached()
            )
            for each in lost
        ]

    def to_reopen(self) -> Sequence[str]:
        found, self._reopen = tuple(sorted(self._reopen)), set()
        return found


def _later(one: str, other: str) -> bool:
    """Return whether a session comes after another one. Sessions of two lives of a worker cannot be compared."""
    (life, _, number), (other_life, _, other_number) = one.rpartition("-"), other.rpartition("-")
    return life != other_life or int(number) > int(other_number)
