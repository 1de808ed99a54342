"""The router's DecisionService: its own decision records, and the traces of the whole suite."""

from __future__ import annotations

from typing import Any

from grpc import aio

from common.decision_convert import decision_to_proto
from common.decisions import DecisionRing
from common.errors import FieldViolation, InvalidRequest
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from router.trace_store import TraceStore


class DecisionServicer(decision_pb2_grpc.DecisionServiceServicer):
    """Answers from the ring and the store. Errors are mapped by the server's interceptor."""

    def __init__(self, ring: DecisionRing, store: TraceStore) -> None:
        self._ring = ring
        self._store = store

    async def ListDecisions(
        self, request: decision_pb2.ListDecisionsRequest, context: aio.ServicerContext[Any, Any]
    ) -> decision_pb2.ListDecisionsResponse:
        """Return records, newest last."""
        found = self._ring.find(request.request_id, request.kind, request.limit)
        return decision_pb2.ListDecisionsResponse(decisions=map(decision_to_proto, found))

    async def GetTrace(
        self, request: decision_pb2.GetTraceRequest, context: aio.ServicerContext[Any, Any]
    ) -> decision_pb2.GetTraceResponse:
        """Return the spans of a trace; NOT_FOUND when the store has none."""
        if not request.trace_id and not request.request_id:
            raise InvalidRequest(FieldViolation("id", "is missing; expected trace_id or request_id"))
        return self._store.trace(request.trace_id.lower(), request.request_id)
