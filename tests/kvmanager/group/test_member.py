"""A member of a group that is sent away at an awkward moment, and a watch of the owner that an address misleads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from grpc import aio

from common.contracts.clock import SystemClock
from common.contracts.errors import StaleEpoch, Unavailable
from common.process.ports import free_ports
from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from kvmanager.contracts.ports import IndexUnavailable
from kvmanager.group.leadership import Attempt, Leadership, Lease
from kvmanager.group.member import GroupMember, owner_gone
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.support.turns import until_blocked

PATIENCE, TERM = 60.0, 5


class OwnLease:
    """The lease of one owner, which nobody else wants; while `lost` is set, calls fail when a test lets them."""

    def __init__(self) -> None:
        self.group, self.lost, self.failing, self.fail = "g", False, asyncio.Event(), asyncio.Event()

    async def hold(self, attempt: Attempt, address: str, namespace: str) -> int | Lease:
        await self._answer()
        return TERM

    async def resign(self) -> None:
        await self._answer()

    async def close(self) -> None: ...

    async def _answer(self) -> None:
        if self.lost:
            self.failing.set()
            await self.fail.wait()
            raise IndexUnavailable("no answer")


class Rig:
    """A member whose taking of the lead a test lets end."""

    def __init__(self) -> None:
        self.lease, self.leading, self.led = OwnLease(), asyncio.Event(), asyncio.Event()
        core = Leadership("me", 600.0, 0.25)
        self.supervisor = Supervisor()
        self.member = GroupMember(
            core, self.lease, SystemClock(), open_channel, self._lead, self._stand_by, lambda error: None
        )

    async def _lead(self, namespace: str) -> None:
        self.leading.set()
        await self.led.wait()

    async def _stand_by(self, why: str) -> None: ...

    async def address(self) -> str:
        return "127.0.0.1:1"

    async def until_it_says_that_it_leads(self) -> None:
        async for state in self.member.states():
            if state.leads:
                return


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.lease.fail.set()
    await rig.supervisor.aclose()
    await rig.member.aclose()


async def test_a_manager_that_is_sent_away_while_it_takes_the_lead_never_says_that_it_leads(rig: Rig) -> None:
    rig.member.start(rig.supervisor, rig.address)
    async with asyncio.timeout(PATIENCE):
        await rig.leading.wait()
        await rig.member.resign()
        turn = rig.member._turn
        rig.led.set()
        await turn.wait()  # the round is over
        state = await anext(rig.member.states())
        assert (state.leads, state.term, rig.member.leads()) == (False, 0, False)
        with pytest.raises(Unavailable, match="is shutting down"):
            await rig.member.confirmed()


async def test_who_asks_a_leader_in_doubt_that_is_sent_away_gets_an_answer(rig: Rig) -> None:
    rig.led.set()
    rig.member.start(rig.supervisor, rig.address)
    async with asyncio.timeout(PATIENCE):
        await rig.until_it_says_that_it_leads()
        rig.lease.lost = True
        rig.member.doubt(StaleEpoch("a newer manager"))
        await rig.lease.failing.wait()
        resigning = asyncio.create_task(rig.member.resign())
        await until_blocked(resigning)
        # A loop that never yields would stand still here for ever, so this is no wait that a test could end.
        with pytest.raises(Unavailable, match="is shutting down"):
            await rig.member.confirmed()
        rig.lease.fail.set()
        await resigning


async def test_a_manager_that_does_not_know_its_address_yet_ends_when_it_is_sent_away(rig: Rig) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    rig.member.start(rig.supervisor, never)
    async with asyncio.timeout(PATIENCE):
        await rig.member.resign()
        await rig.supervisor.aclose()
    assert not rig.leading.is_set()


# ------------------------------------------------------------ the watch of an owner


class Process(rpc.KvManagerServiceServicer):
    """What answers at an address: it says who it is, and counts who asked."""

    def __init__(self, owner: str) -> None:
        self.owner, self.asked = owner, asyncio.Semaphore(0)

    async def WatchLeader(self, request: pb.WatchLeaderRequest, context: Any) -> AsyncIterator[pb.WatchLeaderResponse]:
        yield pb.WatchLeaderResponse(owner=self.owner, leads=True, term=TERM)
        self.asked.release()
        await asyncio.Event().wait()


async def serve(process: Process, stack: AsyncExitStack, port: int = 0) -> tuple[aio.Server, int]:
    server = aio.server(options=[("grpc.so_reuseport", 0)])  # a taken port is an error at once
    rpc.add_KvManagerServiceServicer_to_server(process, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return server, port


def watch(port: int) -> asyncio.Task[None]:
    lease = Lease(TERM, "owner", f"127.0.0.1:{port}")
    return asyncio.create_task(owner_gone(lease, open_channel, lambda: None))


async def test_an_owner_that_has_answered_is_gone_when_nothing_listens_there() -> None:
    async with asyncio.timeout(PATIENCE), AsyncExitStack() as stack:
        owner = Process("owner")  # type: ignore[abstract]
        server, port = await serve(owner, stack)
        watching = watch(port)
        await owner.asked.acquire()
        assert not watching.done()
        await server.stop(0)
        await watching


async def test_an_address_at_which_the_owner_never_answered_proves_nothing() -> None:
    """First nothing listens there, as behind a firewall that rejects; then another process does."""
    (port,) = free_ports(1)
    looks = asyncio.Semaphore(0)

    def dial(address: str) -> aio.Channel:
        looks.release()
        return open_channel(address)

    lease = Lease(TERM, "owner", f"127.0.0.1:{port}")
    watching = asyncio.create_task(owner_gone(lease, dial, lambda: None))
    async with asyncio.timeout(PATIENCE), AsyncExitStack() as stack:
        for _ in range(3):
            await looks.acquire()
        assert not watching.done()
        other = Process("another")  # type: ignore[abstract]
        await serve(other, stack, port)
        for _ in range(3):
            await other.asked.acquire()
        assert not watching.done()
    watching.cancel()
