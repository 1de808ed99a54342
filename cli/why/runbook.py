"""Where an operator reads on: the runbook that a router serves, or the file that is installed."""

from __future__ import annotations

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from router.api.page.runbook import RUNBOOK_FILE
from router.observe.diagnosis.causes import RUNBOOK

INSTALLED = str(RUNBOOK_FILE)
_PATIENCE_S = 10.0


async def runbook_at(channel: grpc.aio.Channel, admin_address: str) -> str:
    """Return the URL of a router's runbook; the installed file where the router does not say its port."""
    try:
        status = await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=_PATIENCE_S)
    except grpc.aio.AioRpcError:
        return INSTALLED
    if not status.admin_http_port:
        return INSTALLED
    host = admin_address.rpartition(":")[0]
    return f"http://{host}:{status.admin_http_port}{RUNBOOK}"
