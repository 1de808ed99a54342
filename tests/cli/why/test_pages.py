"""Records page by page, of both services and with what is missing; the lines of `quire decisions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest

from cli.commands.decisions import filters_of, listed, parser, services_of
from cli.views.decision_lines import decision_line, lost_line
from cli.why.pages import Listed, Lister, Records
from common.contracts.errors import InvalidConfig
from common.contracts.types import Decision, DecisionKind
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.api.grpc.manager_calls import ManagerCalls
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore

COUNT = 2_500


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A router with more records than one page has, of times from 1 on, and with no KV manager behind it."""
    async with AsyncExitStack() as stack:
        server, ring = RpcServer([]), DecisionRing(10_000, source="router-a", began_ns=1)
        for number in range(1, COUNT + 1):
            ring.record(Decision(f"d{number}", DecisionKind.ROUTING, number, "w0", f"r{number}", worker="w0"))
        calls = ManagerCalls(["127.0.0.1:1"], open_channel)
        rpc.add_DecisionServiceServicer_to_server(
            DecisionServicer(RecordSources(ring, TraceStore(8)), Siblings(), calls), server.server
        )
        port = await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.stop, 0.0)
        yield await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))


async def test_all_pages_are_read_oldest_first(channel: grpc.aio.Channel) -> None:
    found = await Lister(channel).newest(pb.ListDecisionsRequest(), from_manager=False)
    assert [each.time_unix_nano for each in found.records] == list(range(1, COUNT + 1))
    assert (found.complete_since_ns, found.silent_routers, found.failure) == (1, 0, "")
    newest = await Lister(channel).newest(pb.ListDecisionsRequest(), from_manager=False, limit=1_200)
    assert [each.time_unix_nano for each in newest.records] == list(range(COUNT - 1_199, COUNT + 1))


async def test_a_manager_that_does_not_answer_is_missing_and_the_rest_is_listed(channel: grpc.aio.Channel) -> None:
    found = await listed(Lister(channel), parser().parse_args(["--limit", "2"]))
    assert [(service, record.decision_id) for service, record in found.records] == [
        ("router", f"d{COUNT - 1}"),
        ("router", f"d{COUNT}"),
    ]
    (missing,) = found.missing
    assert missing.startswith("the KV manager: no KV manager answers at 127.0.0.1:1")


def test_records_that_the_ring_has_lost_are_said() -> None:
    found = Listed()
    found.add("router", Records(complete_since_ns=2_000_000_000), since_ns=1_000_000_000)
    (missing,) = found.missing
    assert missing.startswith("records of the router from before ")
    found.add("router", Records(complete_since_ns=1), since_ns=1_000_000_000)
    assert len(found.missing) == 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--limit", "0"), "--limit: is 0; expected 1 or more"),
        (("--limit", "-1", "--follow"), "--limit: is -1"),
        (("--tenant", "red", "--service", "manager"), "--tenant: is for records of routers"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        services_of(parser().parse_args(words))
    assert what in str(caught.value)


def test_which_services_are_asked() -> None:
    asked = [(), ("--tenant", "red"), ("--service", "manager"), ("--limit", "0", "--follow")]
    found = [services_of(parser().parse_args(words)) for words in asked]
    assert found == [("router", "manager"), ("router",), ("manager",), ("router", "manager")]
    assert filters_of(parser().parse_args(["--since", "5m"])).since_unix_nano > 0
    assert filters_of(parser().parse_args([])).since_unix_nano == 0


def test_lines_name_who_gave_way_and_what_is_lost() -> None:
    record = pb.DecisionRecord(
        kind="preemption", chosen="a/0", victim="a/0", beneficiary="b/0", worker="w1", request_id="a" * 40,
        reasons=["one", "two", "three"],
    )  # fmt: skip
    line = decision_line(record, "manager").plain
    assert line.endswith("a/0 at w1 gave way to b/0  (one, two and 1 more)")
    assert "a" * 17 + "…  " in line
    position = pb.Position(source="router-a", sequence=7)
    lost = pb.WatchDecisionsResponse(position=position, lost=1_200, lost_because="ring_moved_on")
    assert lost_line(lost, "router").plain.startswith("router: 1,200 records of router-a are missing: newer ones")
    gone = pb.WatchDecisionsResponse(position=position, lost_because="gone")
    assert "may be missing: the process does not answer" in lost_line(gone, "router").plain
