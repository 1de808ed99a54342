"""Managers that are named by one DNS name: their clients find the leader, and follow addresses that come and go."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path

import pytest

from common.contracts.lease import Connected
from common.group.leader_watch import LeaderWatch
from common.process.ports import free_ports
from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from gpuworker.engine.lease_client import LeaseClient
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from router.api.grpc.manager_calls import ManagerCalls
from tests.support.fake_managers import FakeManager, Managers
from tests.support.waiting import until

PATIENCE = 60.0
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs several addresses of the loopback device")


class Dns:
    """What the name stands for now. None: no answer."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: Sequence[str] | None = hosts
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if self.hosts is None:
            raise OSError("no answer")
        return self.hosts


@pytest.fixture
async def managers() -> AsyncIterator[Managers]:
    """Three managers at one port of three addresses; none leads."""
    async with Managers(HOSTS, free_ports(1, HOSTS)[0]) as found:
        yield found


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    found = Supervisor()
    yield found
    await found.aclose()


async def test_the_leader_is_found_among_all_addresses_of_a_name(managers: Managers, supervisor: Supervisor) -> None:
    dns = Dns(*HOSTS[:2])
    watch = LeaderWatch([managers.name], open_channel, resolve=dns, again_s=0.01)
    assert watch.managers == ()
    watch.start(supervisor)
    await until(lambda: watch.managers, lambda found: [each.reachable for each in found] == [True, True])
    assert dns.asked[0] == "managers.test"
    managers[1].say(True, 3)
    await until(lambda: watch.leader == managers[1].address)
    managers[2].say(True, 4)
    dns.hosts = HOSTS  # a third one comes
    await until(lambda: watch.leader == managers[2].address)


async def test_an_address_is_left_once_dns_and_its_manager_are_gone(managers: Managers, supervisor: Supervisor) -> None:
    dns = Dns(*HOSTS[:2])
    watch = LeaderWatch([managers.name], open_channel, resolve=dns, again_s=0.01)
    watch.start(supervisor)
    managers[0].say(True, 3)
    await until(lambda: watch.leader == managers[0].address)
    dns.hosts = HOSTS[1:]
    await until(lambda: len(watch.managers) == 3)
    assert watch.leader == managers[0].address, "it can be reached, whatever DNS says"
    dns.hosts = None
    asked = len(dns.asked)
    await until(lambda: len(dns.asked) > asked + 2)
    assert len(watch.managers) == 3
    dns.hosts = HOSTS[1:]
    await managers.stop(0)
    await until(lambda: [each.address for each in watch.managers] == [each.address for each in managers.all[1:]])
    assert watch.leader is None


async def test_one_address_is_not_followed_until_another_one_comes(managers: Managers, supervisor: Supervisor) -> None:
    dns = Dns(HOSTS[0])
    watch = LeaderWatch([managers.name], open_channel, resolve=dns, again_s=0.01)
    watch.start(supervisor)
    await until(lambda: len(dns.asked) > 2)
    await watch.first_look()
    assert (watch.addresses, watch.managers, managers[0].watched) == ((managers.name,), (), 0)
    managers[0].say(True, 1)
    dns.hosts = HOSTS[:2]
    await until(lambda: watch.leader == managers[0].address)


async def test_a_worker_attaches_to_the_leader_that_a_name_has(managers: Managers) -> None:
    managers[1].say(True, 3)
    client = LeaseClient([managers.name], resolve=Dns(*HOSTS[:2]))
    await client.start()
    async with asyncio.timeout(PATIENCE):
        await managers[1].opened.wait()
        await until(lambda: any(isinstance(event, Connected) for event in client.poll()))
        managers[0].opened.clear()
        managers[0].say(True, 4)
        await managers[0].opened.wait()
    await client.close()


async def test_a_router_asks_the_leaders_of_all_groups_that_a_name_has(
    managers: Managers, supervisor: Supervisor
) -> None:
    for manager, group in zip(managers.all, "aab", strict=True):
        manager.say(manager is not managers[0], 5, group)
    calls = ManagerCalls([managers.name], open_channel, Dns(*HOSTS))
    calls.start(supervisor)
    await until(lambda: all(each.reachable for each in calls.managers()) and len(calls.managers()) == 3)
    pools = await calls.pools(pb.GetPoolRequest())
    assert [each.worker_id for each in pools.pools] == [managers[1].address, managers[2].address]
    assert not pools.silent_groups


@pytest.mark.parametrize("other", [0, 1])
async def test_a_manager_with_two_addresses_is_asked_once(supervisor: Supervisor, other: int) -> None:
    """One process without a group, on two networks."""
    async with Managers(HOSTS[:2], free_ports(1, HOSTS)[0]) as managers:
        for each in managers.all:
            each.owner = "the same"
            each.say(True, 0)
        calls = ManagerCalls([managers.name], open_channel, Dns(*HOSTS[:2]))
        calls.start(supervisor)
        await until(lambda: [each.reachable for each in calls.managers()] == [True, True])
        assert len((await calls.pools(pb.GetPoolRequest())).pools) == 1
        managers[other].owner = "another"  # the address belongs to another process by now
        managers[other].say(True, 0)
        await until(lambda: len(calls._groups.leaders()) == 2)
        assert len((await calls.pools(pb.GetPoolRequest())).pools) == 2
        await supervisor.aclose()


async def test_a_name_without_an_answer_keeps_no_other_one_waiting(supervisor: Supervisor) -> None:
    hangs, answers, asked = asyncio.Event(), Dns(*HOSTS[:2]), []

    async def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        if host == "hangs.test":
            await hangs.wait()
        return await answers(host)

    watch = LeaderWatch(["hangs.test:1", "answers.test:1"], open_channel, resolve=resolve, again_s=0.01)
    watch.start(supervisor)
    await until(lambda: asked.count("answers.test") > 3)
    assert asked.count("hangs.test") == 1, "one lookup of a name at a time"
    assert watch.addresses == ("hangs.test:1", *(f"{host}:1" for host in HOSTS[:2]))


class Hesitant(FakeManager):
    """It listens, and says nothing until it may speak."""

    def __init__(self, may_speak: asyncio.Event) -> None:
        super().__init__()
        self._may_speak = may_speak

    async def WatchLeader(
        self, request: pb.WatchLeaderRequest, context: object
    ) -> AsyncIterator[pb.WatchLeaderResponse]:
        await self._may_speak.wait()
        async for each in super().WatchLeader(request, context):
            yield each


async def test_a_manager_that_is_reached_during_a_lookup_is_not_left(supervisor: Supervisor) -> None:
    found, may_speak, calls = Managers(HOSTS, free_ports(1, HOSTS)[0]), asyncio.Event(), 0
    found.all = [Hesitant(may_speak) for _ in HOSTS]  # type: ignore[abstract]

    async def resolve(_: str) -> Sequence[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            return HOSTS[:2]
        if calls == 2:
            may_speak.set()
            await until(lambda: all(each.reachable for each in watch.managers))
        return HOSTS[1:]

    watch = LeaderWatch([found.name], open_channel, resolve=resolve, again_s=0.01)
    async with found:
        watch.start(supervisor)
        await until(lambda: calls > 4)
        assert watch.addresses == tuple(each.address for each in found.all)
        await supervisor.aclose()


CHILD = """
import asyncio, sys
from common.group.leader_watch import LeaderWatch
from common.process.supervised import Supervisor
from common.rpc.server import open_channel

async def main():
    watch = LeaderWatch([sys.argv[1]], open_channel, lambda: print(watch.leader, flush=True), again_s=0.05)
    watch.start(Supervisor())
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def may_mount() -> None:
    """Skip unless a process here may have a file of hosts of its own. Root in a container often may not."""
    probe = ["unshare", "--mount", "sh", "-c", "mount --bind /etc/hosts /etc/hosts"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs unshare, and the right to mount (root with CAP_SYS_ADMIN)")


@pytest.mark.usefixtures("may_mount")
async def test_the_resolver_of_a_machine_names_all_managers(managers: Managers, tmp_path: Path) -> None:
    """A process with a file /etc/hosts of its own, which changes: nothing but the resolver tells it the addresses."""
    hosts = tmp_path / "hosts"
    write = hosts.write_text
    write("".join(f"{host} managers.test\n" for host in HOSTS[:2]))
    managers[1].say(True, 3)
    mount = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3" "$4"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(hosts), sys.executable, CHILD, managers.name]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert await _line(child) == managers[1].address
        write("".join(f"{host} managers.test\n" for host in HOSTS[1:]))
        managers[2].say(True, 4)
        assert await _line(child) == managers[2].address
    finally:
        child.kill()
        await child.wait()


async def _line(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    line: Awaitable[bytes] = child.stdout.readline()
    async with asyncio.timeout(PATIENCE):
        return (await line).decode().strip()
