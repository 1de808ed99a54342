"""Services on hosts of their own, between which packets are late, lost, or do not pass: no token is lost or wrong."""

from __future__ import annotations

import asyncio

import pytest

from bench.fault_injection.hosts.injection import HostsInjector
from bench.fault_injection.hosts.suite import MANAGERS, WORKERS, Suite
from bench.fault_injection.plan import Fault, Kind

STREAMS, TOKENS = 16, 600

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def inject(hosts: Suite, kind: Kind, victim: str = "") -> None:
    """Let something fail between hosts; what streams have a way around lasts until all have ended."""

    async def ended() -> None:
        await asyncio.wait(hosts.running)

    await HostsInjector(hosts).inject(Fault(kind, victim), ended)


async def whole_again(hosts: Suite) -> None:
    """What was apart comes together: each worker serves again, no block is held, and new streams run."""
    injector = HostsInjector(hosts)
    await injector.whole()
    assert not await injector.leaked()
    async with hosts.streams(STREAMS, 8):
        pass


async def test_streams_over_a_whole_network(hosts: Suite) -> None:
    async with hosts.streams(STREAMS, TOKENS):
        pass
    await hosts.until_free()


@pytest.mark.parametrize(
    ("kind", "victim", "tokens"),
    [
        (Kind.PACKETS_LOST, "", 100),
        (Kind.LINKS_SLOW, WORKERS[0], 200),
        (Kind.ROUTER_WITHOUT_WORKER, WORKERS[0], TOKENS),
        (Kind.CLIENT_WITHOUT_ROUTER, "", TOKENS),
        (Kind.WORKER_MOVED, WORKERS[0], TOKENS),
    ],
)
async def test_streams_go_on_and_all_is_whole_afterwards(hosts: Suite, kind: Kind, victim: str, tokens: int) -> None:
    async with hosts.streams(STREAMS, tokens):
        await inject(hosts, kind, victim)
    await whole_again(hosts)


@pytest.mark.parametrize(("kind", "victim"), [(Kind.MANAGER_WITHOUT_WORKER, WORKERS[0]), (Kind.MANAGERS_APART, "")])
async def test_a_leader_that_reaches_redis_stays(hosts: Suite, kind: Kind, victim: str) -> None:
    """Not even managers that do not reach each other change that: the leader holds its lease in Redis."""
    leader = await hosts.leader()
    async with hosts.streams(STREAMS, TOKENS):
        await inject(hosts, kind, victim)
        assert await hosts.leader() == leader
    await whole_again(hosts)


@pytest.mark.parametrize("kind", [Kind.LEADER_ISOLATED, Kind.LEADER_WITHOUT_REDIS])
async def test_a_leader_that_does_not_reach_redis_is_followed_by_the_standby(hosts: Suite, kind: Kind) -> None:
    """When it is reached again, it stands by. Workers leave it as soon as the second one names a higher term."""
    leader = await hosts.leader()
    async with hosts.streams(STREAMS, TOKENS):
        await inject(hosts, kind)
    assert {await hosts.leader()} == set(MANAGERS) - {leader}
    await whole_again(hosts)


@pytest.mark.parametrize("kind", [Kind.ROUTER_WITHOUT_REDIS, Kind.ROUTER_WITHOUT_MANAGERS])
async def test_a_router_needs_neither_the_index_nor_the_admin_plane(hosts: Suite, kind: Kind) -> None:
    """Further streams begin meanwhile."""

    async def ended() -> None:
        await asyncio.wait(hosts.running)
        async with hosts.streams(STREAMS, 8):
            pass

    async with hosts.streams(STREAMS, TOKENS):
        await HostsInjector(hosts).inject(Fault(kind, ""), ended)
    await whole_again(hosts)
