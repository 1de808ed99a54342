"""Which of several managers leads, as each says itself; and a lease client that leaves one that hangs."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from common.contracts.lease import Connected
from common.group.leader_watch import LeaderWatch
from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from gpuworker.engine.lease_client import LeaseClient
from tests.support.fake_managers import FakeManager, Managers
from tests.support.turns import take_turn
from tests.support.waiting import until

PATIENCE = 60.0


@pytest.fixture
async def managers() -> AsyncIterator[tuple[FakeManager, FakeManager]]:
    """A leader of term 3, and a standby."""
    async with Managers(("127.0.0.1", "127.0.0.1")) as pair:
        pair[0].say(True, 3)
        yield pair[0], pair[1]


async def until_leader(watch: LeaderWatch, news: asyncio.Event, address: str | None) -> None:
    async with asyncio.timeout(PATIENCE):
        while watch.leader != address:
            news.clear()
            await news.wait()


async def test_of_two_that_say_that_they_lead_the_higher_term_counts(managers: tuple[FakeManager, FakeManager]) -> None:
    first, second = managers
    news, supervisor = asyncio.Event(), Supervisor()
    watch = LeaderWatch([first.address, second.address, "127.0.0.1:1"], open_channel, news.set)
    watch.start(supervisor)
    await until_leader(watch, news, first.address)
    second.say(True, 4)
    await until_leader(watch, news, second.address)
    second.say(False, 4)
    await until_leader(watch, news, first.address)
    first.say(False, 0)
    await until_leader(watch, news, None)
    assert [each.reachable for each in watch.managers] == [True, True, False]
    await watch.close()
    await supervisor.aclose()


async def test_a_manager_says_since_when_and_one_that_is_lost_is_lost_since_then(
    managers: tuple[FakeManager, FakeManager],
) -> None:
    """The clocks of two machines differ, so a manager sends an age."""
    leader, _ = managers
    leader.state.state_seconds = 1e6
    news, supervisor, began = asyncio.Event(), Supervisor(), time.monotonic()
    watch = LeaderWatch([leader.address, "127.0.0.1:1"], open_channel, news.set)
    watch.start(supervisor)
    await until_leader(watch, news, leader.address)
    leading, lost = watch.managers
    now = time.monotonic()
    assert began - 1e6 <= leading.since <= now - 1e6
    assert began <= lost.since <= now
    await watch.close()
    await supervisor.aclose()


async def test_a_client_leaves_a_manager_that_hangs_when_another_one_leads(
    managers: tuple[FakeManager, FakeManager],
) -> None:
    first, second = managers
    client = LeaseClient([second.address, first.address])
    await client.start()
    async with asyncio.timeout(PATIENCE):
        await first.opened.wait()  # the standby is named first, and gets at most one attempt
        second.opened.clear()
        second.say(True, 4)
        await second.opened.wait()
        await until(lambda: any(isinstance(event, Connected) for event in client.poll()))
    await client.close()


async def test_of_two_that_lead_in_the_same_term_the_one_of_before_stays(
    managers: tuple[FakeManager, FakeManager],
) -> None:
    """As the two addresses of one process. What is heard of the other one changes nothing, whatever comes first."""
    for used, other in (managers, managers[::-1]):
        used.say(True, 3)
        other.say(False, 0)
        news, supervisor = asyncio.Event(), Supervisor()
        watch = LeaderWatch([each.address for each in managers], open_channel, news.set)
        watch.start(supervisor)
        await until_leader(watch, news, used.address)
        for leads in (True, False, True):
            other.say(leads, 3)
            await until_heard(watch, other.address, leads)
            assert watch.leader == used.address
        await watch.close()
        await supervisor.aclose()


async def test_a_leader_with_two_addresses_is_left_by_nobody_when_one_path_breaks(
    managers: tuple[FakeManager, FakeManager],
) -> None:
    """One process on two networks: its watch breaks at one address, while the session there goes on."""
    for each in managers:
        each.owner = "the same"
        each.say(True, 3)
    client = LeaseClient([each.address for each in managers])
    await client.start()
    watch, seen = client._watch, []

    def attached() -> bool:
        return client._connection is not None and not client._connection.ended.done()

    async with asyncio.timeout(PATIENCE):
        await until(lambda: attached() and all(each.leads for each in watch.managers))
        session, used = client._connection, next(each for each in managers if each.address == client._address)
        for _ in range(3):
            used.cut_watches(True)
            await until(lambda: not all(each.reachable for each in watch.managers))
            seen.append(watch.leader)
            used.cut_watches(False)
            await until(lambda: all(each.leads for each in watch.managers))
            seen.append(watch.leader)
    (other,) = (each for each in managers if each is not used)
    assert set(seen) == {other.address}, "the path that works counts, until it breaks"
    assert client._connection is session
    assert attached()
    assert session is not None
    other.opened.clear()
    other.owner = "another"
    other.say(True, 4)  # another process has the address by now
    async with asyncio.timeout(PATIENCE):
        await until(lambda: any(each.owner == "another" for each in watch.managers))
        assert session.ended.done()
        await other.opened.wait()
    await client.close()


async def test_two_changes_of_the_leader_at_once_end_one_attempt_to_attach() -> None:
    """The second one may come in the same turn of the loop, in the next ones, or once the attempt has ended."""
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        for turns in range(5):
            client = LeaseClient([f"127.0.0.1:{hung.getsockname()[1]}", "127.0.0.1:2", "127.0.0.1:3"])
            await client.start()
            await until_opening(client)
            assert client._watch is not None
            client._address = "127.0.0.1:9"
            client._watch.leader = "127.0.0.1:2"
            client._leader_changed()
            for _ in range(turns):
                await take_turn()
            client._watch.leader = "127.0.0.1:3"
            client._leader_changed()
            await client.close()


async def test_a_router_follows_the_leader_of_each_group(managers: tuple[FakeManager, FakeManager]) -> None:
    first, second = managers
    first.say(True, 3, "a")
    second.say(False, 0, "b")
    supervisor = Supervisor()
    watch = LeaderWatch([first.address, second.address, "127.0.0.1:1"], open_channel)
    assert watch.leaders() == {}
    watch.start(supervisor)
    await until_leaders(watch, {"a": first.address, "b": second.address})  # nobody leads b: its manager says that
    first.say(True, 3)  # in no group now: it is one by itself
    await until_leaders(watch, {first.address: first.address, "b": second.address})
    first.say(True, 9, "b")
    await until_leaders(watch, {"b": first.address})
    second.say(True, 10, "b")
    await until_leaders(watch, {"b": second.address})
    await watch.close()
    await supervisor.aclose()


async def until_heard(watch: LeaderWatch, address: str, leads: bool) -> None:
    await until(lambda: {each.address: each.leads for each in watch.managers}[address] == leads)


async def until_opening(client: LeaseClient) -> None:
    await until(lambda: client._opening is not None)


async def until_leaders(watch: LeaderWatch, expected: dict[str, str]) -> None:
    await until(lambda: watch.leaders() == expected)
