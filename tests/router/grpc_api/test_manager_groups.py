"""Calls of operators where several groups of KV managers share a pool: real servers that say what a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Self

import pytest
from grpc import StatusCode, aio

from common.errors import FieldViolation, InvalidRequest, NotFound, Unavailable
from common.process.ports import free_ports
from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from common.rpc.status import abort
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.grpc_api.group_streams import DecisionFollower, EventFollower, Merged
from router.grpc_api.manager_calls import ManagerCalls
from router.grpc_api.manager_groups import ManagerGroups

PATIENCE = 60.0
DOWN = "127.0.0.1:1"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SILENT = (StatusCode.UNAVAILABLE, "this KV manager stands by")


class Manager(rpc.KvManagerServiceServicer, decision_pb2_grpc.DecisionServiceServicer):
    """The leader of one group, with one worker. `silent`: it refuses every call but that of who leads; `full`: pins."""

    full = False
    last, ends = b"h" * 16, 1_000.0

    def __init__(self, group: str) -> None:
        self.group, self.worker, self.silent, self.address = group, f"w-{group}", False, ""
        self.events: asyncio.Queue[pb.SubscribeKvEventsResponse | None] = asyncio.Queue()
        self.asked: list[Any] = []
        self.says, self.go_on = SILENT, asyncio.Event()
        self.go_on.set()

    async def _check(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        await self.go_on.wait()
        if self.silent:
            await context.abort(*self.says)

    async def WatchLeader(self, request: Any, context: Any) -> AsyncIterator[pb.WatchLeaderResponse]:
        yield pb.WatchLeaderResponse(owner=self.group, leads=True, term=1, group=self.group)
        await asyncio.Event().wait()

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        await self._check(request, context)
        return pb.GetPoolResponse(epoch=ord(self.group), pools=[pb.Pool(worker_id=self.worker, free=1)])

    async def GetBlock(self, request: pb.GetBlockRequest, context: Any) -> pb.GetBlockResponse:
        await self._check(request, context)
        if request.worker_id != self.worker:
            await context.abort(StatusCode.NOT_FOUND, f"no worker {request.worker_id} is attached")
        return pb.GetBlockResponse()

    async def ResetPrefixCache(self, request: Any, context: Any) -> pb.ResetPrefixCacheResponse:
        await self._check(request, context)
        workers = [pb.WorkerReset(worker_id=self.worker, dropped_blocks=3, confirmed=True)]
        return pb.ResetPrefixCacheResponse(dropped_blocks=3, workers=workers, index_current=True)

    def _pin(self, name: str) -> pb.PinnedPrefix:
        there = [pb.PinAtWorker(worker_id=self.worker, blocks_there=2)]
        return pb.PinnedPrefix(name=name, num_blocks=2, workers=there, last_block_hash=self.last, expires=self.ends)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        await self._check(request, context)
        if self.full:
            await abort(context, InvalidRequest(FieldViolation("block_hashes", "8 blocks are pinned")))
        return pb.PinPrefixResponse(pin=self._pin(request.name), durable=True)

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        await self._check(request, context)
        return pb.ListPinsResponse(pins=[self._pin("common"), self._pin(f"of-{self.group}")], durable=True)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        await self._check(request, context)
        if request.name not in ("common", f"of-{self.group}"):
            await context.abort(StatusCode.NOT_FOUND, f"nothing is pinned as {request.name}")
        return pb.UnpinPrefixResponse()

    async def ListDecisions(self, request: Any, context: Any) -> decision_pb2.ListDecisionsResponse:
        await self._check(request, context)
        record = decision_pb2.DecisionRecord(decision_id=f"{self.group}-1", sequence=1, time_unix_nano=ord(self.group))
        return decision_pb2.ListDecisionsResponse(decisions=[record], source=self.group)

    async def WatchDecisions(self, request: Any, context: Any) -> AsyncIterator[decision_pb2.WatchDecisionsResponse]:
        await self._check(request, context)
        at = max((each.sequence for each in request.positions if each.source == self.group), default=0) + 1
        record = decision_pb2.DecisionRecord(decision_id=f"{self.group}-{at}")
        position = decision_pb2.Position(source=self.group, sequence=at)
        yield decision_pb2.WatchDecisionsResponse(decisions=[record], position=position)
        await self.events.get()  # the end of the stream
        await context.abort(*SILENT)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
        await self._check(request, context)
        while (event := await self.events.get()) is not None:
            yield event
        await context.abort(*SILENT)


@pytest.fixture
async def managers() -> AsyncIterator[list[Manager]]:
    """The leaders of groups a and b."""
    both, servers = [Manager("a"), Manager("b")], []  # type: ignore[abstract]
    for each in both:
        server = aio.server()
        rpc.add_KvManagerServiceServicer_to_server(each, server)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(each, server)
        each.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    yield both
    for server in servers:
        await server.stop(None)


@pytest.fixture
async def groups(managers: list[Manager]) -> AsyncIterator[ManagerGroups]:
    """Both groups, known by name."""
    supervisor = Supervisor()
    found = ManagerGroups([each.address for each in managers], open_channel)
    found.start(supervisor)
    async with asyncio.timeout(PATIENCE):
        while set(found.leaders()) != {"a", "b"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield found
    await supervisor.aclose()


@pytest.fixture
def calls(groups: ManagerGroups, managers: list[Manager]) -> ManagerCalls:
    found = ManagerCalls([each.address for each in managers], open_channel)
    found._groups = groups
    return found


async def test_pools_and_decisions_of_all_groups_are_one_answer(calls: ManagerCalls) -> None:
    pools = await calls.pools(pb.GetPoolRequest())
    assert [each.worker_id for each in pools.pools] == ["w-a", "w-b"]
    assert (pools.epoch, list(pools.silent_groups)) == (ord("b"), [])
    found = await calls.decisions(decision_pb2.ListDecisionsRequest(limit=1))
    assert [each.decision_id for each in found.decisions] == ["b-1"]
    whole = await calls.decisions(decision_pb2.ListDecisionsRequest())
    assert [each.decision_id for each in whole.decisions] == ["a-1", "b-1"]


async def test_a_group_that_does_not_answer_is_named_and_the_others_are_shown(
    calls: ManagerCalls, managers: list[Manager]
) -> None:
    managers[1].silent = True
    pools = await calls.pools(pb.GetPoolRequest())
    assert [each.worker_id for each in pools.pools] == ["w-a"]
    assert list(pools.silent_groups) == ["b"]
    found = await calls.decisions(decision_pb2.ListDecisionsRequest())
    assert list(found.silent_groups) == ["b"]
    managers[0].silent = True
    with pytest.raises(Unavailable, match="stands by"):
        await calls.pools(pb.GetPoolRequest())


async def test_a_block_is_found_at_the_group_that_has_its_worker(calls: ManagerCalls, managers: list[Manager]) -> None:
    assert await calls.block(pb.GetBlockRequest(worker_id="w-b")) == pb.GetBlockResponse()
    with pytest.raises(NotFound, match="no worker w-c"):
        await calls.block(pb.GetBlockRequest(worker_id="w-c"))
    managers[1].silent = True  # it may have the worker
    with pytest.raises(Unavailable):
        await calls.block(pb.GetBlockRequest(worker_id="w-c"))


async def test_a_reset_reaches_all_groups_or_says_which_it_did_not(
    calls: ManagerCalls, managers: list[Manager]
) -> None:
    done = await calls.reset(pb.ResetPrefixCacheRequest())
    assert (done.dropped_blocks, done.index_current) == (6, True)
    assert [each.worker_id for each in done.workers] == ["w-a", "w-b"]
    managers[0].silent = True
    with pytest.raises(Unavailable, match="the other groups were reset, and group a was not"):
        await calls.reset(pb.ResetPrefixCacheRequest())


async def test_decisions_of_all_groups_are_watched_and_go_on_after_a_break(
    groups: ManagerGroups, managers: list[Manager]
) -> None:
    follower = DecisionFollower(groups, decision_pb2.WatchDecisionsRequest())
    merged = Merged(lambda: tuple(groups.leaders()), follower, again_s=0.01)
    async with aclosing(merged.messages()) as messages, asyncio.timeout(PATIENCE):
        first = [await anext(messages), await anext(messages)]
        assert sorted(each.decisions[0].decision_id for each in first) == ["a-1", "b-1"]
        managers[0].events.put_nowait(None)
        gone = await anext(messages)
        assert (gone.position.source, gone.lost_because) == ("a", "gone")
        assert (await anext(messages)).decisions[0].decision_id == "a-2"


def snapshot(worker: str, session: int) -> pb.SubscribeKvEventsResponse:
    found = pb.SubscribeKvEventsResponse(worker_id=worker, stream=f"life-{session}", number=session)
    found.snapshot.last = True
    return found


def left(worker: str, session: int) -> pb.SubscribeKvEventsResponse:
    return pb.SubscribeKvEventsResponse(
        worker_id=worker, stream=f"life-{session}", number=session, detached=pb.KvDetached()
    )


async def test_events_of_all_groups_come_in_one_stream_and_a_worker_may_move(
    groups: ManagerGroups, managers: list[Manager]
) -> None:
    first, second = managers
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    merged = Merged(lambda: tuple(groups.leaders()), follower, again_s=0.01)
    async with aclosing(merged.messages()) as messages, asyncio.timeout(PATIENCE):
        first.events.put_nowait(snapshot("w", 1))
        assert await anext(messages) == snapshot("w", 1)
        second.events.put_nowait(snapshot("w", 2))  # it has moved; its old group says so later
        assert await anext(messages) == snapshot("w", 2)
        for late in (left("w", 1), snapshot("other", 1)):
            first.events.put_nowait(late)
        assert await anext(messages) == snapshot("other", 1)
        first.events.put_nowait(None)  # its manager ends: its worker counts for nothing until it comes again
        assert await anext(messages) == left("other", 1)
        first.events.put_nowait(snapshot("other", 2))
        assert await anext(messages) == snapshot("other", 2)
        second.events.put_nowait(left("w", 2))
        assert await anext(messages) == left("w", 2)


def of_life(life: str, **event: Any) -> pb.SubscribeKvEventsResponse:
    return pb.SubscribeKvEventsResponse(worker_id="w", stream=f"{life}-1", number=1, **event)


def test_only_a_snapshot_takes_a_worker_from_its_group(groups: ManagerGroups) -> None:
    """Lives cannot be compared. The end of an old one, in the group that the worker has left, ends nothing."""
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    whole, some, left_it = pb.KvSnapshot(last=True), pb.KvChanges(), pb.KvDetached()
    assert follower.passed("a", of_life("first", snapshot=whole))
    assert follower.passed("b", of_life("second", snapshot=whole))
    assert not follower.passed("a", of_life("first", changes=some))
    assert not follower.passed("a", of_life("first", detached=left_it))
    assert follower.passed("b", of_life("second", changes=some))
    assert [each.stream for each in follower.ended("b")] == ["second-1"], "b has the worker until its stream ends"


def test_after_its_end_a_worker_begins_with_a_snapshot(groups: ManagerGroups) -> None:
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    assert follower.passed("a", of_life("first", changes=pb.KvChanges())), "the reader has what was before"
    assert follower.passed("a", of_life("first", detached=pb.KvDetached()))
    assert not follower.passed("b", of_life("second", changes=pb.KvChanges()))
    assert not follower.passed("b", of_life("second", detached=pb.KvDetached()))
    assert follower.passed("b", of_life("second", snapshot=pb.KvSnapshot(last=True)))
    assert follower.passed("b", of_life("second", changes=pb.KvChanges()))


async def test_a_worker_that_an_older_life_hid_comes_back_when_that_one_ends(
    groups: ManagerGroups, managers: list[Manager]
) -> None:
    """The worker has left a and started anew in b; what a says of its old life comes late."""
    first, second = managers
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    merged = Merged(lambda: tuple(groups.leaders()), follower, again_s=0.01)
    whole = pb.KvSnapshot(last=True)
    async with aclosing(merged.messages()) as messages, asyncio.timeout(PATIENCE):
        second.events.put_nowait(of_life("second", snapshot=whole))
        assert await anext(messages) == of_life("second", snapshot=whole)
        first.events.put_nowait(of_life("first", snapshot=whole))
        assert await anext(messages) == of_life("first", snapshot=whole)
        asked = len(second.asked)
        first.events.put_nowait(of_life("first", detached=pb.KvDetached()))
        assert await anext(messages) == of_life("first", detached=pb.KvDetached())
        waiting = asyncio.ensure_future(anext(messages))
        while len(second.asked) == asked:  # the stream of its new life begins again  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        second.events.put_nowait(of_life("second", snapshot=whole))
        assert await waiting == of_life("second", snapshot=whole)


def test_a_reader_that_resumes_gets_a_worker_back_that_an_older_life_hid(groups: ManagerGroups) -> None:
    """Its group goes on after the reader's earlier position, so no snapshot says that the group has the worker."""
    position = pb.KvPosition(worker_id="w", stream="second-1", number=1)
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest(after=[position]))
    assert follower.passed("b", of_life("second", changes=pb.KvChanges()))
    assert follower.passed("a", of_life("first", snapshot=pb.KvSnapshot(last=True)))
    assert not follower.passed("b", of_life("second", changes=pb.KvChanges()))
    assert follower.passed("a", of_life("first", detached=pb.KvDetached()))
    assert follower.to_reopen() == ("b",)


def test_an_earlier_session_is_not_asked_for_again(groups: ManagerGroups) -> None:
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    assert follower.passed("a", snapshot("w", 1))
    assert follower.passed("b", snapshot("w", 2))
    assert follower.passed("b", left("w", 2))
    assert not follower.to_reopen(), "a has not noticed yet that the worker left it"


async def test_a_call_that_a_manager_cuts_off_was_not_cancelled_by_its_caller(
    calls: ManagerCalls, managers: list[Manager]
) -> None:
    for each in managers:
        each.silent, each.says = True, (StatusCode.CANCELLED, "")
    with pytest.raises(Unavailable, match="ended the call as it stopped"):
        await calls.pools(pb.GetPoolRequest())


async def test_a_stream_ends_with_the_error_when_no_group_answers(
    groups: ManagerGroups, managers: list[Manager]
) -> None:
    for each in managers:
        each.silent = True
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    merged = Merged(lambda: tuple(groups.leaders()), follower, again_s=0.01)
    with pytest.raises(Unavailable, match="stands by"):
        async with aclosing(merged.messages()) as messages, asyncio.timeout(PATIENCE):
            await anext(messages)


@pytest.fixture
async def one_down(managers: list[Manager]) -> AsyncIterator[ManagerCalls]:
    """Groups a and b, and a third address where nobody has answered since the router's start."""
    supervisor = Supervisor()
    found = ManagerCalls([*(each.address for each in managers), DOWN], open_channel)
    found.start(supervisor)
    yield found
    await supervisor.aclose()


async def test_a_manager_that_never_answered_is_named_from_the_first_call_on(
    one_down: ManagerCalls, managers: list[Manager]
) -> None:
    """Nobody knows its group. It may be one whose other managers are down too."""
    pools = await one_down.pools(pb.GetPoolRequest())
    assert [each.worker_id for each in pools.pools] == ["w-a", "w-b"]
    words = f"{DOWN} (it has not answered since the router's start)"
    assert list(pools.silent_groups) == [words]
    assert list((await one_down.pins(pb.ListPinsRequest())).silent_groups) == [words]
    managers[0].silent = True
    found = await one_down.decisions(decision_pb2.ListDecisionsRequest())
    assert list(found.silent_groups) == [words, "a"]


async def test_a_manager_that_never_answered_keeps_no_change_from_the_groups_that_are_known(
    one_down: ManagerCalls, managers: list[Manager]
) -> None:
    """It is a standby most of the time, and may be down for long."""
    reset = await one_down.reset(pb.ResetPrefixCacheRequest())
    assert (reset.dropped_blocks, list(reset.unheard_managers)) == (6, [DOWN])
    pinned = await one_down.pin(pb.PinPrefixRequest(name="common"))
    assert list(pinned.unheard_managers) == [DOWN]
    assert list((await one_down.unpin(pb.UnpinPrefixRequest(name="common"))).unheard_managers) == [DOWN]
    managers[1].silent = True
    with pytest.raises(Unavailable, match=r"^the other groups were reset, and group b was not: this KV manager stands"):
        await one_down.reset(pb.ResetPrefixCacheRequest())


class Late:
    """A manager that is down at first, and calls that name it: by its address, or by a name that stands for `hosts`."""

    def __init__(self, group: str, others: list[Manager], hosts: Sequence[str] | None = None) -> None:
        self.manager = Manager(group)  # type: ignore[abstract]
        self.port = free_ports(1, HOSTS)[0]
        self.hosts, name = hosts, HOSTS[0] if hosts is None else "late.test"
        self._address, self._name = f"{HOSTS[0]}:{self.port}", f"{name}:{self.port}"
        names = [*(each.address for each in others), self._name]
        self.calls = ManagerCalls(names, self._dial, self._resolve)
        self.calls._groups._watch._again_s = 0.01
        self._supervisor, self._server = Supervisor(), aio.server()
        rpc.add_KvManagerServiceServicer_to_server(self.manager, self._server)

    async def __aenter__(self) -> Self:
        self.calls.start(self._supervisor)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.manager.go_on.set()
        await self._supervisor.aclose()
        await self._server.stop(None)

    def _dial(self, address: str) -> aio.Channel:
        return open_channel(DOWN if address.startswith("late.test") else address)

    async def _resolve(self, _: str) -> Sequence[str]:
        if not self.hosts:
            raise OSError("no such name")
        return self.hosts

    async def begin(self, *hosts: str) -> None:
        for host in hosts or HOSTS[:1]:
            self._server.add_insecure_port(f"{host}:{self.port}")
        await self._server.start()

    async def addresses(self, *hosts: str) -> None:
        """Let the name stand for these hosts, and wait until the router knows that."""
        self.hosts, names = hosts, {f"{host}:{self.port}" for host in hosts}
        async with asyncio.timeout(PATIENCE):
            while not names <= {each.address for each in self.calls.managers()} or (  # noqa: ASYNC110
                len(self.calls.managers()) > len(names) + 2
            ):
                await asyncio.sleep(0.01)

    async def asked_for(self, *requests: Any) -> None:
        """Wait until the manager was asked for these."""
        async with asyncio.timeout(PATIENCE):
            while any(each not in self.manager.asked for each in requests):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """Wait until nothing is kept for the manager any more."""
        async with asyncio.timeout(PATIENCE):
            while len(self.calls._late):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_the_group_of_a_manager_that_comes_late_gets_the_changes_that_it_missed(managers: list[Manager]) -> None:
    async with Late("c", managers) as late:
        late.manager.silent = True  # nobody leads its group at first
        for number in range(2):
            await late.calls.pin(pb.PinPrefixRequest(name="common", num_tokens=number))
        await late.calls.pin(pb.PinPrefixRequest(name="gone", duration=0.5))
        await late.calls.pin(pb.PinPrefixRequest(name="of-a"))
        await late.calls.unpin(pb.UnpinPrefixRequest(name="of-a"))
        await late.calls.reset(pb.ResetPrefixCacheRequest())
        assert len(late.calls._late) == 4
        await late.begin()
        async with asyncio.timeout(PATIENCE):
            while not late.manager.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        late.manager.silent = False
        late.manager.asked.clear()
        await late.settled()
        asked = late.manager.asked
        assert pb.PinPrefixRequest(name="common", num_tokens=1) in asked, "the last of its name"
        assert pb.PinPrefixRequest(name="common", num_tokens=0) not in asked
        assert pb.UnpinPrefixRequest(name="of-a") in asked
        # The group may begin to answer in the middle of a round.
        assert sorted(each.name for each in asked if isinstance(each, pb.PinPrefixRequest)) == ["common", "gone"]
        (gone,) = [each for each in asked if isinstance(each, pb.PinPrefixRequest) and each.name == "gone"]
        assert 0.0 < gone.duration < 0.5, "what is left of its time"
        assert pb.ResetPrefixCacheRequest() in asked


async def test_a_standby_that_comes_late_is_asked_nothing(managers: list[Manager]) -> None:
    async with Late("a", managers) as late:
        await late.calls.pin(pb.PinPrefixRequest(name="common"))
        before = len(managers[0].asked)
        await late.begin()
        await late.settled()
        assert (late.manager.asked, len(managers[0].asked)) == ([], before), "its group has the pin"


async def test_changes_for_managers_that_never_answer_are_bounded(
    one_down: ManagerCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.grpc_api.late_groups.MAX_LATE_CHANGES", 2)
    for name in ("one", "two", "two"):
        await one_down.pin(pb.PinPrefixRequest(name=name))
    with pytest.raises(Unavailable, match="2 changes wait for the managers at"):
        await one_down.pin(pb.PinPrefixRequest(name="three"))


async def test_ends_of_pins_make_way_for_other_changes(
    one_down: ManagerCalls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Names may be unique: each pin that ended, and each that was removed, would be kept for itself."""
    monkeypatch.setattr("router.grpc_api.late_groups.MAX_LATE_CHANGES", 2)
    await one_down.pin(pb.PinPrefixRequest(name="of-a"))
    await one_down.unpin(pb.UnpinPrefixRequest(name="of-a"))
    await one_down.pin(pb.PinPrefixRequest(name="over", duration=1e-6))
    await one_down.pin(pb.PinPrefixRequest(name="stays"))
    assert "will not get the end of pin of-a" in caplog.text
    await one_down.reset(pb.ResetPrefixCacheRequest())
    assert "will not get the end of pin over" in caplog.text
    with pytest.raises(Unavailable, match="2 changes wait for the managers at"):
        await one_down.pin(pb.PinPrefixRequest(name="more"))
    monkeypatch.setattr("router.grpc_api.late_groups.MAX_LATE_CHANGES", 3)
    await one_down.unpin(pb.UnpinPrefixRequest(name="of-b"))
    monkeypatch.setattr("router.grpc_api.late_groups._REMOVAL_KEPT_S", 0.0)
    await one_down.pin(pb.PinPrefixRequest(name="more"))
    assert len(one_down._late) == 3


async def test_a_change_that_fails_leaves_the_earlier_one_kept(managers: list[Manager]) -> None:
    async with Late("c", managers) as late:
        await late.calls.unpin(pb.UnpinPrefixRequest(name="of-a"))
        for each in managers:
            each.silent = True
        with pytest.raises(Unavailable):
            await late.calls.unpin(pb.UnpinPrefixRequest(name="of-a"))
        assert len(late.calls._late) == 1
        await late.begin()
        await late.asked_for(pb.UnpinPrefixRequest(name="of-a"))


@pytest.mark.parametrize("code", [StatusCode.DEADLINE_EXCEEDED, StatusCode.RESOURCE_EXHAUSTED, StatusCode.INTERNAL])
async def test_a_late_group_that_fails_is_asked_again(managers: list[Manager], code: StatusCode) -> None:
    async with Late("c", managers) as late:
        late.manager.silent, late.manager.says = True, (code, "busy")
        await late.calls.pin(pb.PinPrefixRequest(name="common"))
        await late.begin()
        await late.asked_for(pb.PinPrefixRequest(name="common"))
        late.manager.silent = False
        await late.settled()
        assert late.manager.asked.count(pb.PinPrefixRequest(name="common")) >= 2


async def test_a_late_group_that_hangs_delays_no_other_change(managers: list[Manager]) -> None:
    async with Late("c", managers) as late:
        await late.calls.reset(pb.ResetPrefixCacheRequest())
        await late.calls.pin(pb.PinPrefixRequest(name="common"))
        late.manager.go_on.clear()
        await late.begin()
        async with asyncio.timeout(PATIENCE):
            while not late.manager.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert late.manager.asked == [pb.ResetPrefixCacheRequest()]
        async with late.calls._late.changing("pin common"), late.calls._late.changing("reset of the prefix cache"):
            assert late.manager.asked == [pb.ResetPrefixCacheRequest()], "one call of a group at a time"
        late.manager.go_on.set()
        await late.settled()


async def test_a_change_outlasts_the_addresses_that_a_name_has(managers: list[Manager]) -> None:
    """Nobody is there at first. Then DNS names pods that come and go before one of them leads its group."""
    async with Late("c", managers, ()) as late:
        reset = await late.calls.reset(pb.ResetPrefixCacheRequest())
        assert [each.partition(":")[0] for each in reset.unheard_managers] == ["late.test"]
        await late.addresses(*HOSTS[:2])
        await late.addresses(HOSTS[1])
        await late.addresses(*HOSTS[1:])
        assert len(late.calls._late) == 1
        await late.begin(*HOSTS[1:])
        await late.asked_for(pb.ResetPrefixCacheRequest())
        await late.settled()
        assert late.manager.asked == [pb.ResetPrefixCacheRequest()]


async def test_a_pod_that_comes_back_elsewhere_gets_its_change(managers: list[Manager]) -> None:
    """Its address is gone from DNS in between, and everybody else was heard."""
    async with Late("a", managers[:1], HOSTS[:2]) as late:
        await late.begin(HOSTS[0])
        await late.addresses(*HOSTS[:2])
        async with asyncio.timeout(PATIENCE):
            while f"{HOSTS[0]}:{late.port}" not in late.calls._groups.heard():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        pin = pb.PinPrefixRequest(name="common")
        assert len((await late.calls.pin(pin)).unheard_managers) >= 1
        late.hosts = HOSTS[:1]
        async with asyncio.timeout(PATIENCE):
            while late.calls._groups.unheard():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        other = Manager("b")  # type: ignore[abstract]
        server = aio.server()
        rpc.add_KvManagerServiceServicer_to_server(other, server)
        server.add_insecure_port(f"{HOSTS[2]}:{late.port}")
        await server.start()
        await late.addresses(HOSTS[0], HOSTS[2])
        async with asyncio.timeout(PATIENCE):
            while pin not in other.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await late.settled()
        await server.stop(None)


async def test_a_manager_that_answered_once_is_its_groups_matter(managers: list[Manager]) -> None:
    """A standby that is down makes no answer incomplete: its group is known, and another manager leads it."""
    supervisor, server = Supervisor(), aio.server()
    standby = Manager("a")  # type: ignore[abstract]
    rpc.add_KvManagerServiceServicer_to_server(standby, server)
    standby.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    calls = ManagerCalls([managers[0].address, standby.address], open_channel)
    calls.start(supervisor)
    assert list((await calls.pools(pb.GetPoolRequest())).silent_groups) == []
    await server.stop(None)
    async with asyncio.timeout(PATIENCE):
        while calls.managers()[1].reachable:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert list((await calls.pools(pb.GetPoolRequest())).silent_groups) == []
    await supervisor.aclose()


async def test_every_group_pins_and_one_pin_is_shown(calls: ManagerCalls) -> None:
    answer = await calls.pin(pb.PinPrefixRequest(name="common"))
    assert ([each.worker_id for each in answer.pin.workers], answer.durable) == (["w-a", "w-b"], True)
    shown = await calls.pins(pb.ListPinsRequest())
    assert [(each.name, [at.worker_id for at in each.workers], list(each.missing_groups)) for each in shown.pins] == [
        ("common", ["w-a", "w-b"], []),
        ("of-a", ["w-a"], ["b"]),
        ("of-b", ["w-b"], ["a"]),
    ]


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("inf"), 60.0])
async def test_the_groups_get_a_duration_as_the_operator_gave_it(
    calls: ManagerCalls, managers: list[Manager], seconds: float
) -> None:
    """A manager refuses what is no duration."""
    request = pb.PinPrefixRequest(name="common", duration=seconds)
    await calls.pin(request)
    assert [each.asked for each in managers] == [[request], [request]]


async def test_groups_that_keep_different_contents_under_one_name_are_named(
    calls: ManagerCalls, managers: list[Manager]
) -> None:
    """A pin was replaced while a group did not answer."""
    managers[1].ends = 1_007.0  # its clock differs
    assert [list(each.differing_groups) for each in (await calls.pins(pb.ListPinsRequest())).pins] == [[], [], []]
    managers[1].last = b"o" * 16
    shown = await calls.pins(pb.ListPinsRequest())
    assert [(each.name, list(each.differing_groups)) for each in shown.pins] == [
        ("common", ["b"]),
        ("of-a", []),
        ("of-b", []),
    ]
    managers[1].last, managers[1].ends = managers[0].last, 9_000.0
    assert list((await calls.pins(pb.ListPinsRequest())).pins[0].differing_groups) == ["b"]


async def test_a_group_that_does_not_pin_is_named(calls: ManagerCalls, managers: list[Manager]) -> None:
    managers[1].silent = True
    with pytest.raises(
        Unavailable, match=r"^the other groups keep the prefix, and group b does not: .*; pin it again$"
    ):
        await calls.pin(pb.PinPrefixRequest(name="common"))
    shown = await calls.pins(pb.ListPinsRequest())
    assert list(shown.silent_groups) == ["b"]
    assert not any(each.missing_groups for each in shown.pins), "it may keep them"
    with pytest.raises(Unavailable, match=r"^the other groups removed the pin, and group b did not: "):
        await calls.unpin(pb.UnpinPrefixRequest(name="common"))


async def test_a_group_beyond_its_bound_refuses_a_pin(calls: ManagerCalls, managers: list[Manager]) -> None:
    managers[0].full = True
    said = "8 blocks are pinned; that is group a; kept by group b: `quire unpin common` ends that"
    with pytest.raises(InvalidRequest, match=said):
        await calls.pin(pb.PinPrefixRequest(name="common"))
    managers[1].full = True
    with pytest.raises(InvalidRequest, match=r"8 blocks are pinned$"):
        await calls.pin(pb.PinPrefixRequest(name="common"))


async def test_a_pin_of_one_group_alone_is_removed_there(calls: ManagerCalls) -> None:
    assert await calls.unpin(pb.UnpinPrefixRequest(name="of-b")) == pb.UnpinPrefixResponse()
    with pytest.raises(NotFound):
        await calls.unpin(pb.UnpinPrefixRequest(name="nothing"))
