"""The decision records of this manager; traces are kept by the router."""

from __future__ import annotations

from typing import Any

from grpc import aio

from common.decisions.ring import DecisionRing
from common.errors import Unsupported
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2, decision_pb2_grpc

SERVICE = "quire.decision.v1.DecisionService"

_Context = aio.ServicerContext[Any, Any]


class DecisionServicer(decision_pb2_grpc.DecisionServiceServicer):
    def __init__(self, ring: DecisionRing) -> None:
        self._ring = ring

    async def ListDecisions(
        self, request: decision_pb2.ListDecisionsRequest, context: _Context
    ) -> decision_pb2.ListDecisionsResponse:
        """Return the newest records that match, oldest first."""
        found = self._ring.find(request.request_id, request.kind, request.limit)
        return decision_pb2.ListDecisionsResponse(decisions=map(decision_to_proto, found))

    async def GetTrace(self, request: decision_pb2.GetTraceRequest, context: _Context) -> decision_pb2.GetTraceResponse:
        """Raise Unsupported: the router keeps the traces."""
        raise Unsupported("the KV manager keeps no traces; ask the router")
