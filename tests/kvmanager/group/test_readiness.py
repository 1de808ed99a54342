"""A manager of a group is ready while it leads or stands by: probes of its gRPC port and of /health say the same."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.process.ports import free_ports
from common.rpc.health import LIVE, wait_until_serving
from common.rpc.server import open_channel
from kvmanager.contracts.ports import IndexUnavailable
from kvmanager.group.leadership import Attempt, Leadership, Lease
from kvmanager.group.member import GroupMember
from tests.kvmanager.group.test_member import Rig
from tests.support.kvmanager.manager_child import ManagerChild, manager_process

PATIENCE = 120.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class OthersLease:
    """A lease that another manager holds, or that cannot be reached."""

    group = "one"

    def __init__(self) -> None:
        self.reachable = False

    async def hold(self, attempt: Attempt, address: str, namespace: str) -> int | Lease:
        if not self.reachable:
            raise IndexUnavailable("no answer")
        return Lease(3, "another", "127.0.0.1:1")

    async def resign(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.supervisor.aclose()
    await rig.member.aclose()


async def until_settled(member: GroupMember) -> None:
    async with asyncio.timeout(PATIENCE):
        async for state in member.states():
            if state.settled:
                return


async def test_a_member_is_settled_once_it_knows_who_leads(rig: Rig) -> None:
    lease = OthersLease()
    rig.member._lease, rig.member._core = lease, Leadership("me", 0.3, 0.01)
    rig.member.start(rig.supervisor, rig.address)
    async with asyncio.timeout(PATIENCE):
        await rig.member._fresh_round()
    assert not rig.member.settled
    lease.reachable = True
    await until_settled(rig.member)
    assert not rig.member.leads()
    lease.reachable = False  # it goes on to stand by the leader that it knows
    async with asyncio.timeout(PATIENCE):
        await rig.member._fresh_round()
    assert rig.member.settled


async def test_a_member_that_leads_is_settled(rig: Rig) -> None:
    rig.led.set()
    assert not rig.member.settled
    rig.member.start(rig.supervisor, rig.address)
    await until_settled(rig.member)
    assert rig.member.leads()


# ------------------------------------------------------------ processes


async def status_of(address: str, service: str = "") -> int:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE)).status)


def health_page(manager: ManagerChild) -> tuple[int, str]:
    """Return status and body of /health. The first line of a manager names the port."""
    words = manager.ready.split()
    port = words[words.index("on") + 1].strip(",")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_a_manager_that_reaches_no_redis_is_alive_and_not_ready(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    flags = ("--redis-url", f"redis://127.0.0.1:{nobody}", "--group", "g")
    async with manager_process(tmp_path, *flags) as manager:
        assert [await status_of(manager.address, service) for service in ("", LIVE)] == [NOT_SERVING, SERVING]
        status, body = await asyncio.to_thread(health_page, manager)
        assert status == 503
        assert "the manager knows of no leader of its group yet" in body


async def test_the_leader_and_the_standby_are_ready(tmp_path: Path, redis_url: str) -> None:
    flags = ("--redis-url", redis_url, "--group", "g", "--group-lease", "60")
    async with manager_process(tmp_path / "a", *flags) as first, manager_process(tmp_path / "b", *flags) as second:
        for each in (first, second):
            async with open_channel(each.address) as channel:
                await wait_until_serving(channel, PATIENCE)
            assert (await asyncio.to_thread(health_page, each))[0] == 200
