"""The records of a request over the admin plane: of the router, of a KV manager behind it, and by a client's own id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest

from cli.why.gather import Gatherer
from cli.why.ids import full_id, id_of
from cli.why.pages import Lister
from common.contracts.errors import InvalidRequest, NotFound
from common.contracts.types import Decision, DecisionKind
from common.decisions.ring import DecisionRing
from common.rpc.server import RpcServer, open_channel
from kvmanager.service.decision_servicer import DecisionServicer as ManagerServicer
from quire.decision.v1 import decision_pb2_grpc as rpc
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.api.grpc.manager_calls import ManagerCalls
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore
from tests.support.spans import tracer_to

ENDED = Outcome(ended="length", before=(("prefill", 0.5),))


@dataclass
class Planes:
    """A router's admin plane, and a manager that it asks for its records."""

    channel: grpc.aio.Channel
    manager: RpcServer
    ring: DecisionRing = field(default_factory=lambda: DecisionRing(8))
    manager_ring: DecisionRing = field(default_factory=lambda: DecisionRing(8))
    store: TraceStore = field(default_factory=lambda: TraceStore(8))

    def ended(self, name: str, tenant: str = "") -> None:
        self.ring.record(Decision(f"end-{name}", DecisionKind.OUTCOME, 5, "length", name, (), texts_of(ENDED),
                                  figures=figures_of(ENDED), tenant=tenant))  # fmt: skip


@pytest.fixture
async def planes() -> AsyncIterator[Planes]:
    async with AsyncExitStack() as stack:
        router, manager = RpcServer([]), RpcServer([])
        made = Planes(None, manager)  # type: ignore[arg-type]
        rpc.add_DecisionServiceServicer_to_server(ManagerServicer(made.manager_ring), manager.server)
        port = await manager.start("127.0.0.1", 0)
        calls = ManagerCalls([f"127.0.0.1:{port}"], open_channel)
        servicer = DecisionServicer(RecordSources(made.ring, made.store), Siblings(), calls)
        rpc.add_DecisionServiceServicer_to_server(servicer, router.server)
        port = await router.start("127.0.0.1", 0)
        stack.push_async_callback(router.stop, 0.0)
        stack.push_async_callback(manager.stop, 0.0)
        made.channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
        yield made


async def test_records_of_both_services_make_one_story(planes: Planes) -> None:
    planes.ended("r1")
    planes.manager_ring.record(Decision("g", DecisionKind.GRANT, 1, "2 fresh blocks", "r1"))
    planes.manager_ring.record(Decision("p", DecisionKind.PREEMPTION, 2, "r0", "r0", victim="r0", beneficiary="r1"))
    history = await Gatherer(planes.channel).history("r1")
    assert history.outcome is not None
    assert (len(history.grants), [each.victim for each in history.gained_from], history.unread) == (1, ["r0"], ())


async def test_a_manager_that_does_not_answer_is_named_and_the_rest_is_told(planes: Planes) -> None:
    planes.ended("r1")
    await planes.manager.stop(0.0)
    history = await Gatherer(planes.channel).history("r1")
    assert history.outcome is not None
    (unread,) = history.unread
    assert unread.startswith("the KV manager: no KV manager answers at 127.0.0.1:")


@pytest.mark.parametrize("name", ["r1", "chatcmpl-r1", "cmpl-r1", "msg_r1"])
async def test_the_id_of_an_answer_is_the_requests_id_behind_a_prefix(planes: Planes, name: str) -> None:
    planes.ended("r1")
    assert (await Gatherer(planes.channel).history(name)).request_id == "r1"


async def test_a_clients_own_id_is_found_by_the_trace(planes: Planes) -> None:
    planes.ended("r1")
    span = tracer_to(planes.store.add_own).start_span("request")
    span.set_attributes({"quire.request_id": "r1", "quire.correlation_id": "order-77"})
    span.end()
    assert (await Gatherer(planes.channel).history("order-77")).request_id == "r1"


@pytest.mark.parametrize("name", ["r-4", "chatcmpl-r-4", "r-41f", id_of("r-41…")])
async def test_the_first_characters_of_an_id_are_enough(planes: Planes, name: str) -> None:
    planes.ended("r-41f0")
    planes.ended("r-5")
    assert (await Gatherer(planes.channel).history(name)).request_id == "r-41f0"
    lister = Lister(planes.channel)
    assert [await full_id(lister, each) for each in (name, "r-5", "x")] == ["r-41f0", "r-5", "x"]


async def test_a_request_that_runs_is_found_by_its_placement(planes: Planes) -> None:
    planes.ring.record(Decision("p", DecisionKind.ROUTING, 1, "worker-0", "r-41f0"))
    assert await full_id(Lister(planes.channel), "r-4") == "r-41f0"


async def test_an_id_that_another_one_begins_with_is_itself(planes: Planes) -> None:
    planes.ended("r1")
    planes.ended("r12")
    assert (await Gatherer(planes.channel).history("r1")).request_id == "r1"


async def test_characters_that_begin_several_ids_are_refused_with_the_newest(planes: Planes) -> None:
    for number in range(5):
        planes.ended(f"r-{number}")
    said = r"REQUEST: r- begins the ids of 5 requests \(r-4, r-3, r-2, \.\.\.\); give more of the one that you mean"
    with pytest.raises(InvalidRequest, match=said):
        await Gatherer(planes.channel).history("r-")


async def test_an_unknown_id_is_said_with_what_to_do(planes: Planes) -> None:
    with pytest.raises(NotFound, match=r"no record of request r9: .* `quire why --last` shows the newest one"):
        await Gatherer(planes.channel).history("r9")


async def test_a_request_of_another_tenant_is_said_with_what_to_do(planes: Planes) -> None:
    planes.ended("r1", tenant="red")
    assert (await Gatherer(planes.channel, "red").history("r1")).tenant == "red"
    with pytest.raises(NotFound, match="request r1 is none of tenant blue; name its own tenant, or leave --tenant out"):
        await Gatherer(planes.channel, "blue").history("r1")


async def test_lists_have_the_requests_of_one_tenant(planes: Planes) -> None:
    for name, tenant in (("r1", "red"), ("r2", "blue")):
        planes.ended(name, tenant)
    assert [each.request_id for each in (await Gatherer(planes.channel, "blue").ends()).records] == ["r2"]
    assert len((await Gatherer(planes.channel).ends()).records) == 2
