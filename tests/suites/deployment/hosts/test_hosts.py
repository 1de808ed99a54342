"""Services on hosts of their own, between which packets are late, lost, or do not pass: no token is lost or wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests.suites.deployment.hosts.suite import WORKERS, Suite, until

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
            for host in ("manager", WORKERS[0]):
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

    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition("manager", WORKERS[0]):
            await until(given_up)
    await whole_again(hosts)


@pytest.mark.parametrize("pair", [("router", "redis"), ("manager", "redis"), ("router", "manager")], ids="-".join)
async def test_streams_need_neither_the_index_nor_the_admin_plane(hosts: Suite, pair: tuple[str, str]) -> None:
    """The partition lasts until all streams have ended, and further ones that begin meanwhile."""
    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition(*pair):
            await asyncio.wait(hosts.running)
            async with hosts.streams(STREAMS, 8):
                pass
    await whole_again(hosts)


async def test_a_client_that_is_cut_off_for_a_moment_reads_on(hosts: Suite) -> None:
    """After 5 s without a sign (the keepalive's timeout) its connection ends, and the router cancels its requests."""
    async with hosts.streams(STREAMS, TOKENS):
        with hosts.network.partition("client", "router"):
            await asyncio.sleep(0.5)
    await whole_again(hosts)


async def test_a_worker_moves_to_another_address(hosts: Suite) -> None:
    """Its streams end at the other worker. It tells the manager its new address, and routers find it there."""
    async with hosts.streams(STREAMS, TOKENS):
        hosts.network.move(WORKERS[0])
        await asyncio.wait(hosts.running)
    await whole_again(hosts)
