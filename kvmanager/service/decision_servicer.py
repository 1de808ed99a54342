"""The decision records of this manager; traces are kept by the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc import aio

from common.contracts.errors import Unsupported
from common.decisions.pages import gone, page_of, watch_of
from common.decisions.ring import DecisionRing
from common.decisions.watch import WatcherLimit
from quire.decision.v1 import decision_pb2, decision_pb2_grpc

SERVICE = "quire.decision.v1.DecisionService"

_Context = aio.ServicerContext[Any, Any]


class DecisionServicer(decision_pb2_grpc.DecisionServiceServicer):
    def __init__(self, ring: DecisionRing) -> None:
        self._ring, self._limit = ring, WatcherLimit()

    async def ListDecisions(
        self, request: decision_pb2.ListDecisionsRequest, context: _Context
    ) -> decision_pb2.ListDecisionsResponse:
        """Return the newest records that match, oldest first."""
        return await page_of(self._ring, request)

    async def WatchDecisions(
        self, request: decision_pb2.WatchDecisionsRequest, context: _Context
    ) -> AsyncIterator[decision_pb2.WatchDecisionsResponse]:
        """Stream records as they are made. Raises Overloaded."""
        with self._limit:
            for each in request.positions:
                if each.source != self._ring.source:
                    yield gone(each.source)
            async with aclosing(watch_of(self._ring, request)) as responses:
                async for response in responses:
                    yield response

    async def Explain(self, request: decision_pb2.ExplainRequest, context: _Context) -> decision_pb2.ExplainResponse:
        """Raise Unsupported: the router places requests."""
        raise Unsupported("the KV manager places no requests; ask the router")

    def WatchRequests(
        self, request: decision_pb2.WatchRequestsRequest, context: _Context
    ) -> AsyncIterator[decision_pb2.WatchRequestsResponse]:
        """Raise Unsupported: the router serves requests."""
        raise Unsupported("the KV manager serves no requests; ask the router")

    async def GetTrace(self, request: decision_pb2.GetTraceRequest, context: _Context) -> decision_pb2.GetTraceResponse:
        """Raise Unsupported: the router keeps the traces."""
        raise Unsupported("the KV manager keeps no traces; ask the router")
