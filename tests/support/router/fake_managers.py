"""Leaders of groups of KV managers: real servers that say what a test lets them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence, Set
from typing import Any, Self

import pytest
from grpc import StatusCode, aio

from common.contracts.errors import FieldViolation, InvalidRequest
from common.process.ports import free_ports
from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from common.rpc.status import abort
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.api.grpc.manager_calls import ManagerCalls
from tests.support.waiting import until

PATIENCE = 60.0
DOWN = "127.0.0.1:1"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SILENT = (StatusCode.UNAVAILABLE, "this KV manager stands by")


class Manager(rpc.KvManagerServiceServicer, decision_pb2_grpc.DecisionServiceServicer):
    """The leader of one group, with one worker. `silent`: it refuses every call but that of who leads; `full`: pins.

    `serves`: it listens before a router begins. `pins` are the tokens of each pin by its name.
    """

    full = serves = False
    last, ends = b"h" * 16, 1_000.0

    def __init__(self, group: str) -> None:
        self.group, self.worker, self.silent, self.address = group, f"w-{group}", False, ""
        self.events: asyncio.Queue[pb.SubscribeKvEventsResponse | None] = asyncio.Queue()
        self.asked: list[Any] = []
        self.pins = {"common": 0, f"of-{group}": 0}
        self.says, self.go_on = SILENT, asyncio.Event()
        self.go_on.set()

    async def _check(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        await self.go_on.wait()
        if self.silent:
            await context.abort(*self.says)

    async def WatchLeader(self, request: Any, context: Any) -> AsyncIterator[pb.WatchLeaderResponse]:
        yield pb.WatchLeaderResponse(owner=self.group, leads=True, term=1, group=self.group)
        await asyncio.Event().wait()

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        await self._check(request, context)
        return pb.GetPoolResponse(epoch=ord(self.group), pools=[pb.Pool(worker_id=self.worker, free=1)])

    async def GetBlock(self, request: pb.GetBlockRequest, context: Any) -> pb.GetBlockResponse:
        await self._check(request, context)
        if request.worker_id != self.worker:
            await context.abort(StatusCode.NOT_FOUND, f"no worker {request.worker_id} is attached")
        return pb.GetBlockResponse()

    async def ResetPrefixCache(self, request: Any, context: Any) -> pb.ResetPrefixCacheResponse:
        await self._check(request, context)
        workers = [pb.WorkerReset(worker_id=self.worker, dropped_blocks=3, confirmed=True)]
        return pb.ResetPrefixCacheResponse(dropped_blocks=3, workers=workers, index_current=True)

    def _pin(self, name: str) -> pb.PinnedPrefix:
        there = [pb.PinAtWorker(worker_id=self.worker, blocks_there=2)]
        kept = pb.PinnedPrefix(name=name, num_blocks=2, num_tokens=self.pins[name], workers=there, expires=self.ends)
        kept.last_block_hash = self.last
        return kept

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        await self._check(request, context)
        if self.full:
            await abort(context, InvalidRequest(FieldViolation("block_hashes", "8 blocks are pinned")))
        self.pins[request.name] = request.num_tokens
        return pb.PinPrefixResponse(pin=self._pin(request.name), durable=True)

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        await self._check(request, context)
        return pb.ListPinsResponse(pins=[self._pin(name) for name in self.pins], durable=True)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        await self._check(request, context)
        if self.pins.pop(request.name, None) is None:
            await context.abort(StatusCode.NOT_FOUND, f"nothing is pinned as {request.name}")
        return pb.UnpinPrefixResponse()

    async def ListDecisions(self, request: Any, context: Any) -> decision_pb2.ListDecisionsResponse:
        await self._check(request, context)
        record = decision_pb2.DecisionRecord(decision_id=f"{self.group}-1", sequence=1, time_unix_nano=ord(self.group))
        return decision_pb2.ListDecisionsResponse(decisions=[record], source=self.group)

    async def WatchDecisions(self, request: Any, context: Any) -> AsyncIterator[decision_pb2.WatchDecisionsResponse]:
        await self._check(request, context)
        at = max((each.sequence for each in request.positions if each.source == self.group), default=0) + 1
        record = decision_pb2.DecisionRecord(decision_id=f"{self.group}-{at}")
        position = decision_pb2.Position(source=self.group, sequence=at)
        yield decision_pb2.WatchDecisionsResponse(decisions=[record], position=position)
        await self.events.get()  # the end of the stream
        await context.abort(*SILENT)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
        await self._check(request, context)
        while (event := await self.events.get()) is not None:
            yield event
        await context.abort(*SILENT)


class Late:
    """A manager that is down at first, and calls that name it: by its address, or by a name that stands for `hosts`."""

    def __init__(self, group: str, others: list[Manager], hosts: Sequence[str] | None = None) -> None:
        self.manager = Manager(group)  # type: ignore[abstract]
        if hosts is not None and sys.platform != "linux":
            pytest.skip("needs several addresses of the loopback device")
        self.port = free_ports(1, HOSTS[:1] if hosts is None else HOSTS)[0]
        self.hosts, name = hosts, HOSTS[0] if hosts is None else "late.test"
        self._address, self._name = f"{HOSTS[0]}:{self.port}", f"{name}:{self.port}"
        names = [*(each.address for each in others), self._name]
        self._groups = {each.group for each in others if each.serves}
        self._names, self.calls = names, self._of_a_router(names)
        # A taken port is an error at once.
        self._supervisor, self._server = Supervisor(), aio.server(options=[("grpc.so_reuseport", 0)])
        rpc.add_KvManagerServiceServicer_to_server(self.manager, self._server)

    def _of_a_router(self, names: Sequence[str]) -> ManagerCalls:
        calls = ManagerCalls(names, self._dial, self._resolve)
        calls._groups._watch._again_s = 0.01
        return calls

    async def another(self) -> ManagerCalls:
        """Return the calls of another router, which begins now."""
        calls = self._of_a_router(self._names)
        calls.start(self._supervisor)
        await knows(calls, self._groups)
        return calls

    async def __aenter__(self) -> Self:
        self.calls.start(self._supervisor)
        await knows(self.calls, self._groups)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.manager.go_on.set()
        await self._supervisor.aclose()
        await self._server.stop(None)

    def _dial(self, address: str) -> aio.Channel:
        return open_channel(DOWN if address.startswith("late.test") else address)

    async def _resolve(self, _: str) -> Sequence[str]:
        if not self.hosts:
            raise OSError("no such name")
        return self.hosts

    async def begin(self, *hosts: str) -> None:
        for host in hosts or HOSTS[:1]:
            self._server.add_insecure_port(f"{host}:{self.port}")
        await self._server.start()

    async def addresses(self, *hosts: str) -> None:
        """Let the name stand for these hosts, and wait until the router knows that."""
        self.hosts, names = hosts, {f"{host}:{self.port}" for host in hosts}
        await until(
            lambda: [each.address for each in self.calls.managers()],
            lambda known: names <= set(known) and len(known) <= len(names) + 2,
        )

    async def asked_for(self, *requests: Any) -> None:
        """Wait until the manager was asked for these."""
        await until(lambda: all(each in self.manager.asked for each in requests))

    async def settled(self) -> None:
        """Wait until nothing is kept for the manager any more."""
        await settled(self.calls)


async def knows(calls: ManagerCalls, groups: Set[str]) -> None:
    """Wait until a router has heard these groups. On a busy machine its first attempt at a manager may fail."""
    await until(lambda: groups <= calls._groups.known())


async def settled(calls: ManagerCalls) -> None:
    """Wait until a router keeps no change any more."""
    await until(lambda: not len(calls._late))
