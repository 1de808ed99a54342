"""Two groups of KV managers, and a router that knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from grpc import aio

from common.process.supervised import Supervisor
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.manager_groups import ManagerGroups
from tests.support.router.fake_managers import DOWN, PATIENCE, Manager, knows


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the answers of a slow machine: the router ends no first look and no call before."""
    monkeypatch.setattr("common.group.leader_watch._FIRST_LOOK_S", PATIENCE)
    monkeypatch.setattr("router.api.grpc.manager_calls._LIST_PATIENCE_S", PATIENCE)


@pytest.fixture
async def managers(patient: None) -> AsyncIterator[list[Manager]]:
    """The leaders of groups a and b."""
    both, servers = [Manager("a"), Manager("b")], []  # type: ignore[abstract]
    for each in both:
        server = aio.server(options=[("grpc.so_reuseport", 0)])
        rpc.add_KvManagerServiceServicer_to_server(each, server)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(each, server)
        each.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        each.serves = True
        servers.append(server)
    yield both
    for server in servers:
        await server.stop(None)


@pytest.fixture
async def calls(managers: list[Manager]) -> AsyncIterator[ManagerCalls]:
    """Calls to both groups, which are known by name."""
    supervisor = Supervisor()
    found = ManagerCalls([each.address for each in managers], open_channel)
    found.start(supervisor)
    await knows(found, {"a", "b"})
    yield found
    await supervisor.aclose()


@pytest.fixture
def groups(calls: ManagerCalls) -> ManagerGroups:
    return calls._groups


@pytest.fixture
async def one_down(managers: list[Manager]) -> AsyncIterator[ManagerCalls]:
    """Groups a and b, and a third address where nobody has answered since the router's start."""
    supervisor = Supervisor()
    found = ManagerCalls([*(each.address for each in managers), DOWN], open_channel)
    found.start(supervisor)
    await knows(found, {"a", "b"})
    yield found
    await supervisor.aclose()
