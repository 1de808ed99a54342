"""The watchers of a manager's leader: bounded, and a manager without a group always leads."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import Overloaded
from common.contracts.limits import MAX_LEADER_WATCHERS
from kvmanager.service.servicer import KvManagerServicer
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.kvmanager.conftest import ChannelTo, Running


async def test_a_manager_without_a_group_says_that_it_leads(manager: Running, channel_to: ChannelTo) -> None:
    async for state in rpc.KvManagerServiceStub(channel_to(manager.address)).WatchLeader(pb.WatchLeaderRequest()):
        assert (state.leads, state.term, state.leader) == (True, 0, manager.address)
        assert state.owner
        return


async def test_one_watcher_too_many_is_refused_until_another_one_leaves(manager: Running) -> None:
    service, context = KvManagerServicer(manager.attachments, lambda seconds: None, manager.process.pins), None

    def watch() -> Any:
        return service.WatchLeader(pb.WatchLeaderRequest(), context)  # type: ignore[arg-type]

    watching = [watch() for _ in range(MAX_LEADER_WATCHERS)]
    for each in watching:
        await anext(each)
    with pytest.raises(Overloaded, match=f"{MAX_LEADER_WATCHERS} watch the leader of this process"):
        await anext(watch())
    await watching.pop().aclose()
    watching.append(watch())
    await anext(watching[-1])
    for each in watching:
        await each.aclose()
