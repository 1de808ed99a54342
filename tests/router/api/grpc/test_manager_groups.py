"""Calls of operators where several groups of KV managers share a pool: real servers that say what a test lets them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from grpc import StatusCode, aio

from common.contracts.errors import InvalidRequest, NotFound, Unavailable
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.api.grpc.group_streams import DecisionFollower, EventFollower, Merged
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.manager_groups import ManagerGroups
from tests.support.router.fake_managers import PATIENCE, Manager
from tests.support.waiting import until


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
    position = pb.KvPosition(worker_id="w", stream="first-1", number=0)
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest(after=[position]))
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
        await until(lambda: len(second.asked) != asked)
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


def test_nothing_is_kept_of_workers_that_have_left(groups: ManagerGroups) -> None:
    """An orchestrator gives workers new names at each start, and a subscription may last for months."""
    follower = EventFollower(groups, pb.SubscribeKvEventsRequest())
    for number in range(100):
        worker = f"w{number}"
        assert follower.passed("a", snapshot(worker, 1))
        assert follower.passed("a", left(worker, 1))
        changes = pb.SubscribeKvEventsResponse(worker_id=worker, stream="life-2", number=2, changes=pb.KvChanges())
        assert not follower.passed("b", changes), "b has not said yet what it has of the worker"
        assert not follower.passed("b", left(worker, 2))
        follower.to_reopen()
    assert follower.known == 0


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


async def test_nobody_is_asked_in_place_of_a_group_that_has_gone(
    groups: ManagerGroups, managers: list[Manager]
) -> None:
    """Its managers have other addresses by now, which DNS does not name yet."""

    async def ask(channel: aio.Channel) -> pb.GetPoolResponse:
        return await rpc.KvManagerServiceStub(channel).GetPool(pb.GetPoolRequest())

    failure = await groups.ask("c", ask)
    assert isinstance(failure, Unavailable)
    assert "no manager of group c is known any more" in str(failure)
    events = EventFollower(groups, pb.SubscribeKvEventsRequest()).open("c")
    with pytest.raises(Unavailable, match="no manager of group c"):
        async with aclosing(events), asyncio.timeout(PATIENCE):
            await anext(events)
    assert not [request for each in managers for request in each.asked]


async def test_a_manager_that_nobody_has_heard_yet_is_asked_all_the_same(managers: list[Manager]) -> None:
    """One address alone is not followed."""
    alone = ManagerGroups([managers[0].address], open_channel)
    assert await alone.ask("", lambda channel: rpc.KvManagerServiceStub(channel).GetPool(pb.GetPoolRequest())) is None
    assert managers[0].asked == [pb.GetPoolRequest()]


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
    """A manager refuses what is not a duration."""
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
