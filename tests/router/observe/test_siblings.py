"""Routers that share their ports answer for each other: decisions, and a trace whose spans came to several of them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest
from grpc import aio
from opentelemetry.trace import Tracer, set_span_in_context

from cli.suite.stack import free_ports
from common.contracts.types import Decision, DecisionKind
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore
from tests.support.spans import tracer_to

ROUTERS, PATIENCE_S = 3, 60.0


@dataclass
class Shared:
    """One of them: what it keeps, and a stub that reaches it."""

    ring: DecisionRing
    tracer: Tracer
    server: RpcServer
    stub: rpc.DecisionServiceStub


@pytest.fixture
async def routers() -> AsyncIterator[list[Shared]]:
    ports = free_ports(ROUTERS)
    async with AsyncExitStack() as stack:
        yield [await _one(stack, port, [other for other in ports if other != port]) for port in ports]


async def _one(stack: AsyncExitStack, port: int, others: list[int]) -> Shared:
    ring, store = DecisionRing(8), TraceStore(8)
    siblings, server = Siblings([f"127.0.0.1:{other}" for other in others], timeout=PATIENCE_S), RpcServer([])
    rpc.add_DecisionServiceServicer_to_server(DecisionServicer(RecordSources(ring, store), siblings), server.server)
    await server.start("127.0.0.1", port)
    stack.push_async_callback(server.stop, 0.0)
    channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
    return Shared(ring, tracer_to(store.add_own), server, rpc.DecisionServiceStub(channel))


def _traced(first: Shared, second: Shared) -> str:
    """Let one router end the span of a request, and another one a span below it; return the trace's id."""
    above = first.tracer.start_span("request", attributes={"quire.request_id": "r1"}, start_time=10)
    below = second.tracer.start_span("prefill", set_span_in_context(above), start_time=20)
    below.end(30)
    above.end(40)
    return f"{above.get_span_context().trace_id:032x}"


async def test_any_router_knows_a_trace_whose_spans_came_to_several(routers: list[Shared]) -> None:
    trace_id = _traced(*routers[:2])
    for router in routers:
        for named in (pb.GetTraceRequest(request_id="r1"), pb.GetTraceRequest(trace_id=trace_id)):
            found = await router.stub.GetTrace(named)
            assert (found.trace_id, [span.name for span in found.spans]) == (trace_id, ["request", "prefill"])


async def test_a_trace_that_no_router_has_is_not_found(routers: list[Shared]) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await routers[0].stub.GetTrace(pb.GetTraceRequest(request_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_decisions_of_all_are_in_the_order_of_their_time(routers: list[Shared]) -> None:
    for time, router in ((30, 0), (10, 1), (20, 2)):
        routers[router].ring.record(Decision(f"d{time}", DecisionKind.ROUTING, time, "w0", request_id="r"))
    listed = await routers[1].stub.ListDecisions(pb.ListDecisionsRequest())
    assert [each.decision_id for each in listed.decisions] == ["d10", "d20", "d30"]
    newest = await routers[1].stub.ListDecisions(pb.ListDecisionsRequest(limit=2))
    assert [each.decision_id for each in newest.decisions] == ["d20", "d30"]


async def test_a_dead_router_is_left_out(routers: list[Shared]) -> None:
    trace_id = _traced(routers[0], routers[2])
    await routers[2].server.stop(0.0)
    found = await routers[1].stub.GetTrace(pb.GetTraceRequest(trace_id=trace_id))
    assert [span.name for span in found.spans] == ["request"]


async def test_a_router_that_hangs_is_left_out_after_its_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        siblings = Siblings([f"127.0.0.1:{silent.getsockname()[1]}"], timeout=0.2)
        assert await siblings.decisions(pb.ListDecisionsRequest()) == []
