"""The start of a suite: what it waits for, on a machine that is busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from cli.demo_model import CHECKPOINT
from cli.suite.programs import Program, StackOptions
from cli.suite.stack import Stack
from quire.inference.v1 import inference_pb2 as pb
from tests.support.fake_router import RouterDouble, served


class LateRouter(RouterDouble):
    """A router that has no processor when it is asked first."""

    asked = 0

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        self.asked += 1
        if self.asked == 1:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
        return pb.GetStatusResponse(workers=[pb.WorkerStatus(state="connected", manager_attached=True)])


async def test_a_router_that_answers_late_is_asked_again(tmp_path: Path) -> None:
    """The unmended start ended with the traceback of the first answer."""
    router = LateRouter()
    async with served(router) as address:
        stack = Stack(StackOptions(model=CHECKPOINT, state_dir=tmp_path), lambda _name, _line: None)
        await stack._connected(Program("router", "router", (), (), address))
    assert router.asked == 2
