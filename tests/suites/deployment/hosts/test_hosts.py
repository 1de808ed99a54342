"""Services on hosts of their own, between which packets are late, lost, or do not pass: no token is lost or wrong."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from bench.fault_injection.hosts.suite import MANAGERS, WORKERS, Suite, until
from bench.fault_injection.plan import CUT_S

STREAMS, TOKENS = 16, 600

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def whole_again(hosts: Suite) -> None:
    """What was apart comes together: each worker serves again, no block is held, and new streams run."""
    await hosts.until_whole()
    await hosts.until_free()
    async with hosts.streams(STREAMS, 8):
        pass


async def test_streams_over_a_whole_network(hosts: Suite) -> None:
    async with hosts.streams(STREAMS, TOKENS):
        pass
    await hosts.until_free()


async def test_a_tenth_of_all_packets_is_lost(hosts: Suite) -> None:
    with hosts.network.loss(0.1):
        async with hosts.streams(STREAMS, 100):
            pass
    await whole_again(hosts)


async def test_every_connection_made_anew_is_slow(hosts: Suite) -> None:
    """The manager and a worker come back behind a delay of 20 ms each way; the client is behind it too."""
    with hosts.network.delay(0.02):
        async with hosts.streams(STREAMS, 200):
            for host in (await hosts.leader(), WORKERS[0]):
                await hosts.kill(host)
                await hosts.start(host)
    await whole_again(hosts)


async def test_streams_leave_a_worker_that_the_router_cannot_reach(hosts: Suite) -> None:
    """They have a path: the other worker. The partition lasts until all have ended there."""
    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition("router", WORKERS[0]):
            await asyncio.wait(hosts.running)
    await whole_again(hosts)


async def test_a_worker_without_its_manager_goes_on_afterwards(hosts: Suite) -> None:
    """The partition lasts until the manager has given the worker up."""

    async def given_up() -> bool:
        return WORKERS[0] not in await hosts.attached()

    leader = await hosts.leader()
    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition(leader, WORKERS[0]):
            await until(given_up)
            assert await hosts.leader() == leader
    await whole_again(hosts)


async def test_a_leader_that_nobody_reaches_is_followed_by_the_standby(hosts: Suite) -> None:
    """It cannot tell Redis that it lives either. When it is reached again, it stands by."""
    leader = await hosts.leader()
    (standby,) = set(MANAGERS) - {leader}

    async def led_by_the_other() -> bool:
        return await hosts.leads(standby) and set(await hosts.attached_to(standby)) == set(WORKERS)

    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.isolated(leader):
            await until(led_by_the_other)
    assert await hosts.leader() == standby
    await whole_again(hosts)


async def test_managers_that_do_not_reach_each_other_go_on_as_they_were(hosts: Suite) -> None:
    """The leader holds its lease in Redis, which both reach: the standby does not take over."""
    leader = await hosts.leader()
    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition(*MANAGERS):
            await asyncio.wait(hosts.running)
            assert await hosts.leader() == leader
    assert await hosts.leader() == leader
    await whole_again(hosts)


async def test_a_leader_without_redis_is_followed_by_the_standby(hosts: Suite) -> None:
    """Workers still reach both. They leave the first leader as soon as the second one names a higher term."""
    leader = await hosts.leader()
    (standby,) = set(MANAGERS) - {leader}

    async def moved() -> bool:
        return await hosts.leads(standby) and set(await hosts.attached_to(standby)) == set(WORKERS)

    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition(leader, "redis"):
            await until(moved)
    assert await hosts.leader() == standby
    await whole_again(hosts)


@pytest.mark.parametrize("cut_off", ["redis", "managers"])
async def test_a_router_needs_neither_the_index_nor_the_admin_plane(hosts: Suite, cut_off: str) -> None:
    """The partition lasts until all streams have ended, and further ones that begin meanwhile."""
    async with hosts.streams(STREAMS, TOKENS):
        with ExitStack() as cuts:
            for host in MANAGERS if cut_off == "managers" else ("redis",):
                cuts.enter_context(hosts.network.partition("router", host))
            await asyncio.wait(hosts.running)
            async with hosts.streams(STREAMS, 8):
                pass
    await whole_again(hosts)


async def test_a_client_that_is_cut_off_for_eight_seconds_reads_on(hosts: Suite) -> None:
    """Both ends bear 15 s without a packet."""
    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition("client", "router"):
            await asyncio.sleep(CUT_S)
    await whole_again(hosts)


async def test_a_worker_moves_to_another_address(hosts: Suite) -> None:
    """Its streams end at the other worker. It tells the manager its new address, and routers find it there."""
    async with hosts.streams(STREAMS, TOKENS):
        hosts.network.move(WORKERS[0])
        await asyncio.wait(hosts.running)
    await whole_again(hosts)
