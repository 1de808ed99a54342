"""Pages and watches over several routers: each record once, in the order of each process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest

from cli.suite.stack import free_ports
from common.contracts.types import Decision, DecisionKind
from common.decisions.merged import merged
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore

PATIENCE_S = 120.0


def answer(source: str, *records: tuple[int, int], token: str = "") -> pb.ListDecisionsResponse:
    """Return the page of one process; a record is (number, time)."""
    messages = [
        pb.DecisionRecord(decision_id=f"{source}{number}", sequence=number, time_unix_nano=at) for number, at in records
    ]
    return pb.ListDecisionsResponse(decisions=messages, source=source, next_page_token=token)


def ids(found: pb.ListDecisionsResponse) -> list[str]:
    return [each.decision_id for each in found.decisions]


def test_the_newest_of_all_are_taken_and_the_token_says_where_each_goes_on() -> None:
    found = merged([answer("a", (4, 10), (5, 40), token="a:4"), answer("b", (1, 20), (2, 30))], None, 3)
    assert (ids(found), found.next_page_token) == (["b1", "b2", "a5"], "a:5,b:1")
    found = merged([answer("a", (4, 10), token="a:4"), answer("b")], {"a": 5, "b": 1}, 3)
    assert (ids(found), found.next_page_token) == (["a4"], "a:4,b:1")
    assert merged([answer("a", (4, 10))], None, 3).next_page_token == ""


def test_a_clock_that_was_set_back_neither_hides_nor_repeats_a_record() -> None:
    first = merged([answer("a", (5, 100), (6, 10)), answer("b", (1, 50))], None, 2)
    # Record 6, older by its clock than 5, is still the newest of its process.
    assert (ids(first), first.next_page_token) == (["a6", "b1"], "a:6,b:1")
    rest = merged([answer("a", (5, 100)), answer("b")], {"a": 6, "b": 1}, 2)
    assert (ids(rest), rest.next_page_token) == (["a5"], "")


@dataclass
class Shared:
    ring: DecisionRing
    server: RpcServer
    stub: rpc.DecisionServiceStub

    def decide(self, number: int, kind: DecisionKind = DecisionKind.ROUTING) -> None:
        self.ring.record(Decision(f"{self.ring.source}-{number}", kind, number, "worker-0", "r1"))


@pytest.fixture
async def routers() -> AsyncIterator[list[Shared]]:
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        yield [await _one(stack, port, [other for other in ports if other != port]) for port in ports]


async def _one(stack: AsyncExitStack, port: int, others: list[int]) -> Shared:
    ring, server = DecisionRing(6, source=f"router-{port}"), RpcServer([])
    siblings = Siblings([f"127.0.0.1:{other}" for other in others])
    rpc.add_DecisionServiceServicer_to_server(
        DecisionServicer(RecordSources(ring, TraceStore(8)), siblings), server.server
    )
    await server.start("127.0.0.1", port)
    stack.push_async_callback(server.stop, 0.0)
    channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
    return Shared(ring, server, rpc.DecisionServiceStub(channel))


class Watch:
    """A watch of a test: what it has seen, and where it got to."""

    def __init__(self, router: Shared, **asked: object) -> None:
        self._call = router.stub.WatchDecisions(pb.WatchDecisionsRequest(**asked), timeout=PATIENCE_S)  # type: ignore[arg-type]
        self.ids: list[str] = []
        self.positions: dict[str, int] = {}
        self.lost: list[tuple[str, int, str]] = []

    async def until(self, records: int = 0, sources: int = 1, lost: int = 0) -> None:
        while len(self.ids) < records or len(self.positions) < sources or len(self.lost) < lost:
            response = await self._call.read()
            assert isinstance(response, pb.WatchDecisionsResponse)
            self.ids += [each.decision_id for each in response.decisions]
            if response.position.sequence or not response.lost_because:
                self.positions[response.position.source] = response.position.sequence
            if response.lost_because:
                self.lost.append((response.position.source, response.lost, response.lost_because))

    def where(self) -> list[pb.Position]:
        return [pb.Position(source=source, sequence=at) for source, at in self.positions.items()]

    def cancel(self) -> None:
        self._call.cancel()


async def test_all_pages_of_two_routers_have_each_record_once(routers: list[Shared]) -> None:
    for number in range(1, 10, 2):
        routers[0].decide(number)
        routers[1].decide(number + 1)
    asked, seen = pb.ListDecisionsRequest(limit=3), list[int]()
    while True:
        page = await routers[0].stub.ListDecisions(asked, timeout=PATIENCE_S)
        seen = [each.time_unix_nano for each in page.decisions] + seen
        asked.page_token = page.next_page_token
        if not asked.page_token:
            break
    assert seen == list(range(1, 11))


async def test_a_router_that_does_not_answer_is_counted(routers: list[Shared]) -> None:
    routers[0].decide(1)
    await routers[1].server.stop(0.0)
    page = await routers[0].stub.ListDecisions(pb.ListDecisionsRequest(), timeout=PATIENCE_S)
    assert (len(page.decisions), page.silent_routers) == (1, 1)


async def test_a_watch_of_one_router_sees_those_of_all_and_resumes_where_it_stopped(routers: list[Shared]) -> None:
    watch = Watch(routers[0])
    await watch.until(sources=2)
    routers[0].decide(1)
    routers[1].decide(2)
    await watch.until(records=2)
    assert sorted(watch.ids) == sorted(f"{each.ring.source}-{n}" for n, each in enumerate(routers, start=1))
    watch.cancel()
    for number in range(3, 12):  # nine more of the first router, which keeps six of its ten; three of the second
        routers[0].decide(number)
    for number in range(3, 6):
        routers[1].decide(number)
    resumed = Watch(routers[0], positions=watch.where())
    await resumed.until(records=9, sources=2, lost=1)
    assert resumed.lost == [(routers[0].ring.source, 3, "ring_moved_on")]
    assert sorted(resumed.positions.values()) == [4, 10]
    resumed.cancel()


async def test_a_process_that_ended_is_said_to_be_gone(routers: list[Shared]) -> None:
    watch = Watch(routers[0], positions=[pb.Position(source="router-old", sequence=7)])
    await watch.until(sources=2, lost=1)
    assert watch.lost == [("router-old", 0, "gone")]
    await routers[1].server.stop(0.0)
    await watch.until(lost=2)
    assert watch.lost[1] == (routers[1].ring.source, 0, "gone")
    routers[0].decide(1)
    await watch.until(records=1)
    watch.cancel()


async def test_filters_hold_for_a_watch_and_for_those_of_siblings(routers: list[Shared]) -> None:
    watch = Watch(routers[0], kind="outcome")
    await watch.until(sources=2)
    for each in routers:
        each.decide(1)
        each.decide(2, DecisionKind.OUTCOME)
    await watch.until(records=2)
    assert sorted(watch.ids) == sorted(f"{each.ring.source}-2" for each in routers)
    watch.cancel()


async def test_too_many_watchers_are_refused_and_a_place_is_free_again(routers: list[Shared]) -> None:
    watches = [Watch(routers[0]) for _ in range(16)]
    for watch in watches:
        await watch.until(sources=2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Watch(routers[0]).until(sources=1)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    watches[0].cancel()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            again = Watch(routers[0])
            try:
                await again.until(sources=1)
                break
            except grpc.aio.AioRpcError:  # the router has not seen the cancellation yet
                await asyncio.sleep(0.01)
    for watch in (*watches, again):
        watch.cancel()


async def test_the_watch_of_a_sibling_that_came_back_goes_on_where_it_stopped(routers: list[Shared]) -> None:
    watch, lost = Watch(routers[0]), routers[1]
    await watch.until(sources=2)
    lost.decide(1)
    await watch.until(records=1)
    await lost.server.stop(0.0)
    await watch.until(lost=1)
    lost.decide(2)
    back = RpcServer([])
    rpc.add_DecisionServiceServicer_to_server(
        DecisionServicer(RecordSources(lost.ring, TraceStore(8)), Siblings()), back.server
    )
    await back.start("127.0.0.1", int(lost.ring.source.rpartition("-")[2]))
    await watch.until(records=2)
    assert watch.ids == [f"{lost.ring.source}-1", f"{lost.ring.source}-2"]
    watch.cancel()
    await back.stop(0.0)
