"""The router's DecisionService: decision records of all routers on its ports, and traces of the whole suite."""

from __future__ import annotations

from typing import Any

from grpc import aio

from common.decisions.ring import DEFAULT_LIMIT, DecisionRing
from common.errors import FieldViolation, InvalidRequest, NotFound
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from router.observe.siblings import Siblings, asked_by_sibling
from router.observe.trace_store import TraceStore

Context = aio.ServicerContext[Any, Any]


class DecisionServicer(decision_pb2_grpc.DecisionServiceServicer):
    """Answers from this process's ring and store, and from those of its siblings unless a sibling asks."""

    def __init__(self, ring: DecisionRing, store: TraceStore, siblings: Siblings) -> None:
        self._ring, self._store, self._siblings = ring, store, siblings

    async def ListDecisions(
        self, request: decision_pb2.ListDecisionsRequest, context: Context
    ) -> decision_pb2.ListDecisionsResponse:
        """Return records, newest last."""
        found = list(map(decision_to_proto, self._ring.find(request.request_id, request.kind, request.limit)))
        if not asked_by_sibling(context):
            for answer in await self._siblings.decisions(request):
                found += answer.decisions
            found.sort(key=lambda record: record.time_unix_nano)
        return decision_pb2.ListDecisionsResponse(decisions=found[-(request.limit or DEFAULT_LIMIT) :])

    async def GetTrace(self, request: decision_pb2.GetTraceRequest, context: Context) -> decision_pb2.GetTraceResponse:
        """Return the spans of a trace; NOT_FOUND when no store has one."""
        if not request.trace_id and not request.request_id:
            raise InvalidRequest(FieldViolation("id", "is missing; expected trace_id or request_id"))
        trace_id = request.trace_id.lower()
        if asked_by_sibling(context):
            return self._store.trace(trace_id, request.request_id)
        if request.request_id:
            trace_id = await self._trace_of(request)
        found = await self._siblings.traces(decision_pb2.GetTraceRequest(trace_id=trace_id)) if trace_id else []
        try:
            found.append(self._store.trace(trace_id, request.request_id))
        except NotFound:
            if not found:
                raise
        spans = {span.span_id: span for answer in found for span in answer.spans}
        ordered = sorted(spans.values(), key=lambda span: (span.start_unix_nano, -span.end_unix_nano))
        return decision_pb2.GetTraceResponse(trace_id=trace_id, spans=ordered)

    async def _trace_of(self, request: decision_pb2.GetTraceRequest) -> str:
        """Return the id of the trace that a request is in, from this router or a sibling; "" when none has it."""
        if trace_id := self._store.trace_of(request.request_id):
            return trace_id
        return next((answer.trace_id for answer in await self._siblings.traces(request)), "")
