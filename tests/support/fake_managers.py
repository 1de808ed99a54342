"""KV managers that say what a test lets them say: who leads, and nothing to a session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Self

from grpc import aio

from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc


class FakeManager(rpc.KvManagerServiceServicer):
    """One manager, which has one worker, named after its address.

    A session that it takes never gets an answer, as at a manager that hangs.
    """

    def __init__(self) -> None:
        self.owner = secrets.token_hex(4)
        self.state, self.changed = pb.WatchLeaderResponse(owner=self.owner), asyncio.Event()
        self.sessions, self.watched, self.opened = 0, 0, asyncio.Event()
        self.address = ""
        self.cut = False

    def cut_watches(self, cut: bool) -> None:
        """End the streams that say who leads, and refuse new ones, or take them again; sessions go on."""
        self.cut = cut
        self._wake()

    def say(self, leads: bool, term: int, group: str = "") -> None:
        self.state = pb.WatchLeaderResponse(owner=self.owner, leads=leads, term=term, group=group)
        self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def WatchLeader(
        self, request: pb.WatchLeaderRequest, context: object
    ) -> AsyncIterator[pb.WatchLeaderResponse]:
        self.watched += 1
        while not self.cut:
            changed = self.changed
            yield self.state
            await changed.wait()

    async def GetPool(self, request: pb.GetPoolRequest, context: object) -> pb.GetPoolResponse:
        return pb.GetPoolResponse(pools=[pb.Pool(worker_id=self.address)])

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.SessionResponse]:
        await context.send_initial_metadata(())
        self.sessions += 1
        self.opened.set()
        async for _ in request_iterator:
            pass
        return
        yield


class Managers:
    """A manager at each of the `hosts`; all at one port, which the name has too, or each at a free one."""

    def __init__(self, hosts: Sequence[str], port: int = 0) -> None:
        self._hosts, self._port, self._servers = hosts, port, list[aio.Server]()
        self.all = [FakeManager() for _ in hosts]  # type: ignore[abstract]
        self.name = f"managers.test:{port}"

    def __getitem__(self, number: int) -> FakeManager:
        return self.all[number]

    async def __aenter__(self) -> Self:
        for host, manager in zip(self._hosts, self.all, strict=True):
            server = aio.server(options=[("grpc.so_reuseport", 0)])  # a taken port is an error at once
            rpc.add_KvManagerServiceServicer_to_server(manager, server)
            manager.address = f"{host}:{server.add_insecure_port(f'{host}:{self._port}')}"
            await server.start()
            self._servers.append(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.stop(None)

    async def stop(self, number: int) -> None:
        await self._servers[number].stop(None)
