"""A watch that goes on over the end of the router that served it, and one of the KV manager behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import grpc
import pytest

from cli.suite.stack import free_ports
from cli.why.watch import Watcher
from common.contracts.types import Decision, DecisionKind
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from kvmanager.service.decision_servicer import DecisionServicer as ManagerServicer
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.api.grpc.manager_calls import ManagerCalls
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore

PATIENCE_S = 120.0
ANY = pb.ListDecisionsRequest()


def decision(number: int) -> Decision:
    return Decision(f"d{number}", DecisionKind.GRANT, number, "1 fresh block", "r1")


async def router(ring: DecisionRing, port: int, manager: str = "") -> RpcServer:
    server = RpcServer([])
    calls = ManagerCalls([manager], open_channel) if manager else None
    rpc.add_DecisionServiceServicer_to_server(
        DecisionServicer(RecordSources(ring, TraceStore(8)), Siblings(), calls), server.server
    )
    await server.start("127.0.0.1", port)
    return server


async def news(stream: AsyncIterator[pb.WatchDecisionsResponse | str]) -> pb.WatchDecisionsResponse:
    """Return the next response that has records, or says that some are gone."""
    async for each in stream:
        if not isinstance(each, str) and (each.decisions or each.lost_because):
            return each
    raise AssertionError("the watch ended")


async def test_a_watch_resumes_at_a_router_that_came_back() -> None:
    (port,) = free_ports(1)
    ring = DecisionRing(4, source="router-a")
    server = await router(ring, port)
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
        watcher = await Watcher.begun(channel, ANY, from_manager=False)
        async with aclosing(watcher.responses()) as stream:
            ring.record(decision(1))
            assert [each.decision_id for each in (await news(stream)).decisions] == ["d1"]
            await server.stop(0.0)
            for number in range(2, 9):  # of seven records the ring keeps four
                ring.record(decision(number))
            server = await router(ring, port)
            late = await news(stream)
            assert ([each.sequence for each in late.decisions], late.lost) == ([5, 6, 7, 8], 3)
    await server.stop(0.0)


async def test_a_router_that_began_anew_is_a_new_source() -> None:
    (port,) = free_ports(1)
    ring = DecisionRing(4, source="router-a")
    server = await router(ring, port)
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
        watcher = await Watcher.begun(channel, ANY, from_manager=False)
        async with aclosing(watcher.responses()) as stream:
            ring.record(decision(1))
            await news(stream)
            await server.stop(0.0)
            fresh = DecisionRing(4, source="router-b")
            server = await router(fresh, port)
            gone = await news(stream)
            assert (gone.position.source, gone.lost_because) == ("router-a", "gone")
            fresh.record(decision(2))
            assert (await news(stream)).position.source == "router-b"
    await server.stop(0.0)


async def test_the_managers_decisions_come_through_the_router() -> None:
    async with AsyncExitStack() as stack:
        manager, ring = RpcServer([]), DecisionRing(4, source="m-1")
        rpc.add_DecisionServiceServicer_to_server(ManagerServicer(ring), manager.server)
        address = f"127.0.0.1:{await manager.start('127.0.0.1', 0)}"
        stack.push_async_callback(manager.stop, 0.0)
        (port,) = free_ports(1)
        server = await router(DecisionRing(4), port, address)
        stack.push_async_callback(server.stop, 0.0)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
        async with asyncio.timeout(PATIENCE_S):
            stub = rpc.DecisionServiceStub(channel)
            old = [pb.Position(source="m-0", sequence=7)]
            call = stub.WatchDecisions(pb.WatchDecisionsRequest(from_manager=True, positions=old))
            gone = await call.read()
            assert isinstance(gone, pb.WatchDecisionsResponse)
            assert (gone.position.source, gone.lost_because) == ("m-0", "gone")
            call.cancel()
            watcher = await Watcher.begun(channel, ANY, from_manager=True)
            async with aclosing(watcher.responses()) as stream:
                ring.record(decision(1))
                assert [each.kind for each in (await news(stream)).decisions] == ["grant"]


async def test_records_of_a_source_that_had_none_are_not_missed() -> None:
    (port,) = free_ports(1)
    ring = DecisionRing(4, source="router-a")
    server = await router(ring, port)
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
        watcher = await Watcher.begun(channel, ANY, from_manager=False)
        async with aclosing(watcher.responses()) as stream:
            assert not isinstance(first := await anext(stream), str)
            assert first.position.sequence == 0
            await server.stop(0.0)
            ring.record(decision(1))
            server = await router(ring, port)
            assert [each.decision_id for each in (await news(stream)).decisions] == ["d1"]
    await server.stop(0.0)


async def test_a_watch_of_a_manager_that_is_away_says_so_and_begins_when_it_is_back() -> None:
    async with AsyncExitStack() as stack:
        ports = free_ports(2)
        server = await router(DecisionRing(4), ports[0], f"127.0.0.1:{ports[1]}")
        stack.push_async_callback(server.stop, 0.0)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{ports[0]}"))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError):
                await Watcher.begun(channel, ANY, from_manager=True)
            watcher = await Watcher.begun(channel, ANY, from_manager=True, may_wait=True)
            async with aclosing(watcher.responses()) as stream:
                notice = await anext(stream)
                assert isinstance(notice, str)
                assert "no KV manager answers" in notice
                manager, ring = RpcServer([]), DecisionRing(4, source="m-1")
                rpc.add_DecisionServiceServicer_to_server(ManagerServicer(ring), manager.server)
                await manager.start("127.0.0.1", ports[1])
                stack.push_async_callback(manager.stop, 0.0)
                begun = await anext(stream)
                assert not isinstance(begun, str)
                ring.record(decision(1))
                assert (await news(stream)).position.source == "m-1"


async def test_no_watch_begins_where_no_router_answers() -> None:
    (port,) = free_ports(1)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await Watcher.begun(channel, ANY, from_manager=False)
