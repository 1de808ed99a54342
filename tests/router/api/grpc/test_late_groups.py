"""Changes of operators for a group whose manager answers later: kept, bounded, and passed on once."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode, aio

from common.contracts.errors import Unavailable
from common.process.ports import free_ports
from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.api.grpc.manager_calls import ManagerCalls
from tests.support.router.fake_managers import DOWN, HOSTS, Late, Manager, settled
from tests.support.waiting import until


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
        await until(lambda: late.manager.asked)
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
    monkeypatch.setattr("router.api.grpc.late_groups.MAX_LATE_CHANGES", 2)
    for name in ("one", "two", "two"):
        await one_down.pin(pb.PinPrefixRequest(name=name))
    with pytest.raises(Unavailable, match="2 changes wait for the managers at"):
        await one_down.pin(pb.PinPrefixRequest(name="three"))


async def test_ends_of_pins_make_way_for_other_changes(
    one_down: ManagerCalls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Names may be unique: each pin that ended, and each that was removed, would be kept for itself."""
    monkeypatch.setattr("router.api.grpc.late_groups.MAX_LATE_CHANGES", 2)
    await one_down.pin(pb.PinPrefixRequest(name="of-a"))
    await one_down.unpin(pb.UnpinPrefixRequest(name="of-a"))
    await one_down.pin(pb.PinPrefixRequest(name="over", duration=1e-6))
    await one_down.pin(pb.PinPrefixRequest(name="stays"))
    assert "will not get the end of pin of-a" in caplog.text
    await one_down.reset(pb.ResetPrefixCacheRequest())
    assert "will not get the end of pin over" in caplog.text
    with pytest.raises(Unavailable, match="2 changes wait for the managers at"):
        await one_down.pin(pb.PinPrefixRequest(name="more"))
    monkeypatch.setattr("router.api.grpc.late_groups.MAX_LATE_CHANGES", 3)
    await one_down.unpin(pb.UnpinPrefixRequest(name="of-b"))
    monkeypatch.setattr("router.api.grpc.late_groups._REMOVAL_KEPT_S", 0.0)
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
        for each in managers:
            each.silent = False
        await late.begin()
        await late.asked_for(pb.UnpinPrefixRequest(name="of-a"))


PIN, OTHER = pb.PinPrefixRequest(name="p", num_tokens=1), pb.PinPrefixRequest(name="p", num_tokens=2)
UNPIN = pb.UnpinPrefixRequest(name="p")


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    ("changes", "kept"),
    [((PIN, UNPIN), None), ((PIN, OTHER), 2), ((PIN, UNPIN, OTHER), 2), ((PIN, OTHER, UNPIN), None)],
)
async def test_of_changes_by_several_routers_the_last_one_counts_whoever_brings_it_last(
    managers: list[Manager], changes: tuple[Any, ...], kept: int | None, last: int
) -> None:
    """The first change goes through one router, and those after it through another one."""
    async with Late("c", managers) as late:
        routers = late.calls, await late.another()
        for number, change in enumerate(changes):
            calls = routers[min(number, 1)]
            await (calls.pin(change) if isinstance(change, pb.PinPrefixRequest) else calls.unpin(change))
        assert [len(each._late) for each in routers] == [1, 1]
        late.manager.pins["p"] = 7
        async with routers[last]._late.changing("pin p"):
            await late.begin()
            await settled(routers[1 - last])
        await settled(routers[last])
        assert late.manager.pins.get("p") == kept


async def test_a_change_waits_until_a_group_that_has_it_says_that_it_still_counts(managers: list[Manager]) -> None:
    async with Late("c", managers) as late:
        await late.calls.pin(PIN)
        await late.calls.reset(pb.ResetPrefixCacheRequest())
        for each in managers:
            each.silent = True
            each.asked.clear()
        await late.begin()
        await until(lambda: all(pb.ListPinsRequest() in each.asked for each in managers))
        assert PIN not in late.manager.asked
        managers[1].silent = False
        await late.settled()
        assert (late.manager.pins["p"], pb.ResetPrefixCacheRequest() in late.manager.asked) == (1, True)


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
        await until(lambda: late.manager.asked)
        assert late.manager.asked == [pb.ResetPrefixCacheRequest()]
        async with late.calls._late.changing("pin common"), late.calls._late.changing("reset of the prefix cache"):
            assert late.manager.asked == [pb.ResetPrefixCacheRequest()], "one call of a group at a time"
        late.manager.go_on.set()
        await late.settled()


async def test_a_late_group_that_hangs_delays_no_group_that_is_heard_meanwhile(managers: list[Manager]) -> None:
    second, server = Manager("d"), aio.server()  # type: ignore[abstract]
    second.address = f"{HOSTS[0]}:{free_ports(1, HOSTS)[0]}"
    rpc.add_KvManagerServiceServicer_to_server(second, server)
    async with Late("c", [*managers, second]) as late:
        await late.calls.reset(pb.ResetPrefixCacheRequest())
        late.manager.go_on.clear()
        await late.begin()
        await late.asked_for(pb.ResetPrefixCacheRequest())
        server.add_insecure_port(second.address)
        await server.start()
        await until(lambda: second.asked)
        assert late.manager.asked == [pb.ResetPrefixCacheRequest()], "it hangs all the time, and is asked once"
        late.manager.go_on.set()
        await late.settled()
    await server.stop(None)


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
        await until(lambda: f"{HOSTS[0]}:{late.port}" in late.calls._groups.heard())
        pin = pb.PinPrefixRequest(name="common")
        assert len((await late.calls.pin(pin)).unheard_managers) >= 1
        late.hosts = HOSTS[:1]
        await until(lambda: not late.calls._groups.unheard())
        other = Manager("b")  # type: ignore[abstract]
        server = aio.server(options=[("grpc.so_reuseport", 0)])
        rpc.add_KvManagerServiceServicer_to_server(other, server)
        server.add_insecure_port(f"{HOSTS[2]}:{late.port}")
        await server.start()
        await late.addresses(HOSTS[0], HOSTS[2])
        await until(lambda: pin in other.asked)
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
    await until(lambda: not calls.managers()[1].reachable)
    assert list((await calls.pools(pb.GetPoolRequest())).silent_groups) == []
    await supervisor.aclose()
