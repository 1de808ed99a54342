"""Queries to the other router processes on the same ports, for records that only one process has.

Any of the processes may receive a call, or the spans that a worker delivers. Each process also has its admin plane on a
port of its own, where its siblings query decisions, spans and figures. A mark on these calls asks for the records of
one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from grpc import aio

from common.rpc.server import Dial, open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2, inference_pb2_grpc

_MARK: Final = "quire-this-process-alone"
_MARKED: Final = ((_MARK, "1"),)

AnswerT = TypeVar("AnswerT")


def asked_by_sibling(context: aio.ServicerContext[Any, Any]) -> bool:
    """Return whether a call asks for the records of this process alone."""
    return any(key == _MARK for key, _ in context.invocation_metadata() or ())


class Siblings:
    """Queries all siblings at once. One that does not answer is left out: its records died with it.

    Operators ask rarely, so each query opens its channels: a renewed certificate counts at once.
    """

    def __init__(self, addresses: Sequence[str] = (), dial: Dial = open_channel, timeout: float = 1.0) -> None:
        """`addresses` are HOST:PORT of the own port of each sibling.

        One that hangs delays an answer by `timeout` seconds.
        """
        self._addresses, self._dial, self._timeout = addresses, dial, timeout

    async def decisions(self, request: decision_pb2.ListDecisionsRequest) -> list[decision_pb2.ListDecisionsResponse]:
        def ask(channel: aio.Channel) -> Awaitable[decision_pb2.ListDecisionsResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            return stub.ListDecisions(request, timeout=self._timeout, metadata=_MARKED)

        return await self._all(ask)

    @property
    def count(self) -> int:
        return len(self._addresses)

    @property
    def addresses(self) -> Sequence[str]:
        return self._addresses

    async def watch(
        self, address: str, request: decision_pb2.WatchDecisionsRequest
    ) -> AsyncGenerator[decision_pb2.WatchDecisionsResponse, None]:
        """Yield the decisions of the sibling at an address, until its stream ends or cannot be opened."""
        try:
            async with self._dial(address) as channel:
                stub = decision_pb2_grpc.DecisionServiceStub(channel)
                async for response in stub.WatchDecisions(request, metadata=_MARKED):
                    yield response
        except aio.AioRpcError:
            return

    async def traces(self, request: decision_pb2.GetTraceRequest) -> list[decision_pb2.GetTraceResponse]:
        """Return the spans that each sibling has of a trace; a sibling without any is left out."""

        def ask(channel: aio.Channel) -> Awaitable[decision_pb2.GetTraceResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            return stub.GetTrace(request, timeout=self._timeout, metadata=_MARKED)

        return await self._all(ask)

    async def add_to(self, status: inference_pb2.GetStatusResponse | inference_pb2.GetLoadsResponse) -> None:
        """Add the requests of each sibling to those of this process."""

        def ask(channel: aio.Channel) -> Awaitable[inference_pb2.GetStatusResponse]:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=self._timeout, metadata=_MARKED)

        for other in await self._all(ask):
            status.queued_requests += other.queued_requests
            status.running_requests += other.running_requests

    async def abort_elsewhere(self, request: inference_pb2.AbortRequest) -> int:
        """Return how many requests the siblings ended."""

        def ask(channel: aio.Channel) -> Awaitable[inference_pb2.AbortResponse]:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return stub.Abort(request, timeout=self._timeout, metadata=_MARKED)

        return sum(answer.aborted for answer in await self._all(ask))

    async def _all(self, ask: Callable[[aio.Channel], Awaitable[AnswerT]]) -> list[AnswerT]:
        answers = await asyncio.gather(*(self._answer(address, ask) for address in self._addresses))
        return [answer for answer in answers if answer is not None]

    async def _answer(self, address: str, ask: Callable[[aio.Channel], Awaitable[AnswerT]]) -> AnswerT | None:
        try:
            async with self._dial(address) as channel:
                return await ask(channel)
        except aio.AioRpcError:
            return None
