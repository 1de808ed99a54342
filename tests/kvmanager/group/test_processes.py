"""Managers of one group as real processes on a real Redis, and a worker that checks every slot that it reads."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from redis.asyncio import Redis

from common.contracts import index_format
from common.rpc.server import open_channel
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.kvmanager.conftest import ChannelTo
from tests.support.kvmanager.fake_session import IDENTITY, RawWorker, attach_of
from tests.support.kvmanager.manager_child import ManagerChild, manager_process
from tests.support.kvmanager.remote_fake_worker import DrivenWorker
from tests.support.lost_status import refusal_of
from tests.support.waiting import until

PATIENCE = 120.0
# Seconds of a lease: one that ends in no test, and one for tests in which it has to end. A manager on a slow machine
# must not lose that one as long as it runs.
LONG, SHORT = 60.0, 5.0
LEASE, TERMS = index_format.group_keys("g")

Launch = Callable[..., Awaitable[ManagerChild]]


@pytest.fixture
async def launch(tmp_path: Path, redis_url: str) -> AsyncIterator[Launch]:
    """Return what starts one more manager of the group."""
    async with AsyncExitStack() as running:
        started: list[ManagerChild] = []

        async def start(*more: str, lease: float = LONG) -> ManagerChild:
            flags = ("--redis-url", redis_url, "--group", "g", "--group-lease", str(lease), *more)
            state = tmp_path / f"state-{len(started)}"
            started.append(await running.enter_async_context(manager_process(state, *flags)))
            return started[-1]

        yield start


async def until_it_says(child: ManagerChild, leads: bool) -> pb.WatchLeaderResponse:
    """Wait until a manager says that it leads, or that it stands by and knows the leader."""
    async with asyncio.timeout(PATIENCE), open_channel(child.address) as channel:
        async for state in rpc.KvManagerServiceStub(channel).WatchLeader(pb.WatchLeaderRequest()):
            if state.leads == leads and state.leader:
                return state
    raise AssertionError("the manager ended")


async def index_of(client: Redis) -> dict[str, object]:
    """Return fence, epoch and term of the index of the tests' identity."""
    space = IDENTITY.namespace
    keys = (index_format.fence_key(space, "g"), index_format.epoch_key(space), index_format.term_key(space, "g"))
    return {key: await client.get(key) for key in keys}


async def owner_of_lease(client: Redis) -> str:
    """Return the address in the lease, once there is one."""
    lease: Any = await until(lambda: client.get(LEASE), seconds=PATIENCE)
    return str(lease.split()[3].decode())


async def until_met(standby: ManagerChild, leader: ManagerChild) -> None:
    """Wait until the standby follows the leader on a stream: only then it takes the lead before the lease is over."""
    port = int(leader.address.rpartition(":")[2])
    await until(
        lambda: any(
            each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
            for each in psutil.Process(standby.process.pid).net_connections("tcp")
        ),
        seconds=PATIENCE,
    )


async def turns(worker: DrivenWorker, count: int = 20) -> None:
    for _ in range(count):
        await worker.turn()


async def test_one_leads_and_the_other_refuses_with_the_leaders_address(launch: Launch, channel_to: ChannelTo) -> None:
    first = await launch()
    leading = await until_it_says(first, leads=True)
    second = await launch()
    state = await until_it_says(second, leads=False)
    assert (state.leader, state.term) == (first.address, leading.term)
    refused = await refusal_of(lambda: RawWorker(channel_to(second.address), attach_of()).refused())
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.details() == f"this KV manager stands by; {first.address} leads its group"


async def test_a_standby_takes_over_from_a_killed_leader_with_a_higher_term_and_epoch(
    launch: Launch, channel_to: ChannelTo
) -> None:
    worker, leader = DrivenWorker(), await launch()
    term = (await until_it_says(leader, leads=True)).term
    for _ in range(3):
        await worker.attach(channel_to(leader.address))
        await turns(worker)
        epoch, standby = worker.epoch, await launch()
        await until_it_says(standby, leads=False)
        await until_met(standby, leader)
        leader.process.kill()
        worker.fake.step()  # on its runway, without a manager
        state = await until_it_says(standby, leads=True)
        assert state.term > term
        term, leader = state.term, standby
        await worker.attach(channel_to(leader.address))
        assert worker.epoch > epoch
    await turns(worker)
    await worker.finish()
    assert worker.fake.live == {}
    assert worker.fake.pool == []


async def test_a_leader_that_was_stopped_grants_and_writes_nothing_and_stands_by(
    launch: Launch, channel_to: ChannelTo, redis_client: Redis
) -> None:
    """A second worker stays with the stopped leader, and reports to it: its report is not answered by grants."""
    worker, stays = DrivenWorker(), DrivenWorker("w1", seed=1)
    old = await launch(lease=SHORT)
    await until_it_says(old, leads=True)
    for each in (worker, stays):
        await each.attach(channel_to(old.address))
        await turns(each)
    new = await launch(lease=SHORT)
    await until_it_says(new, leads=False)
    old.process.send_signal(signal.SIGSTOP)
    leading = await until_it_says(new, leads=True)
    await worker.attach(channel_to(new.address))
    await turns(worker)
    before = await index_of(redis_client)
    stays.fake.step()
    assert stays.stream is not None
    await stays.stream.report(stays.fake.report())
    old.process.send_signal(signal.SIGCONT)
    with pytest.raises(aio.AioRpcError) as refused:
        await stays.stream.receive()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    state = await until_it_says(old, leads=False)
    assert (state.leader, state.term) == (new.address, leading.term)
    await stays.attach(channel_to(new.address))
    for each in (worker, stays):
        await turns(each)
        await each.finish()
        assert each.fake.live == {}
    assert await index_of(redis_client) == before


async def test_a_leader_that_is_sent_away_gives_the_lease_up(
    launch: Launch, channel_to: ChannelTo, redis_client: Redis
) -> None:
    worker, old = DrivenWorker(), await launch()
    await until_it_says(old, leads=True)
    await worker.attach(channel_to(old.address))
    await turns(worker)
    new = await launch()
    await until_it_says(new, leads=False)
    old.process.send_signal(signal.SIGTERM)
    await until_it_says(new, leads=True)
    assert worker.stream is not None
    worker.stream.call.cancel()
    await worker.attach(channel_to(new.address))
    await turns(worker)
    await worker.finish()
    assert (await old.ended())[0] == 0
    lease = await redis_client.get(LEASE)
    assert lease is not None
    assert new.address.encode() in lease


async def test_the_last_manager_of_a_group_leaves_no_lease(launch: Launch, redis_client: Redis) -> None:
    child = await launch()
    await until_it_says(child, leads=True)
    child.process.send_signal(signal.SIGTERM)
    assert (await child.ended())[0] == 0
    assert await redis_client.get(LEASE) is None


async def test_all_managers_are_killed_and_the_next_one_of_this_machine_leads_within_the_life_of_the_lease(
    launch: Launch, channel_to: ChannelTo
) -> None:
    worker, old = DrivenWorker(), await launch()
    term = (await until_it_says(old, leads=True)).term
    await worker.attach(channel_to(old.address))
    await turns(worker)
    old.process.kill()
    await old.ended()
    new = await launch()
    async with asyncio.timeout(0.8 * LONG):
        assert (await until_it_says(new, leads=True)).term > term
    await worker.attach(channel_to(new.address))
    await turns(worker)
    await worker.finish()
    assert worker.fake.live == {}


async def test_after_an_owner_of_another_machine_the_next_one_leads_after_the_lease(
    launch: Launch, redis_client: Redis
) -> None:
    """Its number is that of no process here, which proves nothing."""
    name = f"m-0@{'0' * 32}.4000000.1"
    await redis_client.set(LEASE, f"7 1 {name} 127.0.0.1:1 ")
    child = await launch(lease=SHORT)
    assert (await until_it_says(child, leads=True)).term > 7


async def test_a_wiped_redis_keeps_one_leader_and_the_worker_goes_on(
    launch: Launch, channel_to: ChannelTo, redis_client: Redis
) -> None:
    # Long enough for the one that leads then to lose it to no busy machine.
    children = [await launch(lease=20.0), await launch(lease=20.0)]
    term = (await until_it_says(children[0], leads=True)).term
    worker = DrivenWorker()
    await worker.attach(channel_to(children[0].address))
    await turns(worker)
    await redis_client.flushall()
    owner = await owner_of_lease(redis_client)
    leader = next(each for each in children if each.address == owner)
    assert (await until_it_says(leader, leads=True)).term > term
    await worker.attach(channel_to(leader.address))
    await turns(worker)
    await worker.finish()
    assert worker.fake.live == {}


async def test_a_group_of_another_name_serves_the_pool_of_the_last_one(
    launch: Launch, channel_to: ChannelTo, redis_client: Redis
) -> None:
    """Each group counts its own terms: those of the new one are lower here."""
    await redis_client.set(TERMS, 40_000)
    await redis_client.set(index_format.group_keys("renamed")[1], 12_000)
    worker, old = DrivenWorker(), await launch()
    await until_it_says(old, leads=True)
    await worker.attach(channel_to(old.address))
    await turns(worker)
    epoch = worker.epoch
    old.process.kill()
    new = await launch("--group", "renamed")
    assert (await until_it_says(new, leads=True)).term == 12_001
    await worker.attach(channel_to(new.address))
    assert worker.epoch > epoch
    await turns(worker)
    await worker.finish()
    assert worker.fake.live == {}


async def test_a_refused_address_does_not_move_the_lead(launch: Launch, redis_client: Redis) -> None:
    """Each manager is refused at the other one's address, as by a firewall: the renewals alone say who lives."""
    first = await launch("--group-address", "127.0.0.1:1", lease=15.0)
    term = (await until_it_says(first, leads=True)).term
    await until_it_says(await launch("--group-address", "127.0.0.1:2", lease=15.0), leads=False)
    seen: set[bytes] = set()
    async with asyncio.timeout(PATIENCE):
        while len(seen) < 3:  # two renewals: the standby has found the address refused many times
            lease: Any = await redis_client.get(LEASE)
            held, renewal, *_ = lease.split()
            assert int(held) == term
            seen.add(renewal)
            await asyncio.sleep(0.05)


async def test_a_manager_that_cannot_resolve_redis_ends_when_it_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_POOL_KEY", 32 * "k")
    # The resolver refuses a name with "!" itself: no name server is asked.
    flags = ("--host", "0.0.0.0", "--insecure", "--redis-url", "redis://no!host:6379", "--group", "g")
    async with manager_process(tmp_path / "state", *flags) as child:
        assert child.ready.startswith("READY ")
        child.process.send_signal(signal.SIGTERM)
        assert (await child.ended())[0] == 0
