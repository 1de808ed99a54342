"""Queries to the other router processes on the same ports, for records that only one process has.

Any of the processes may receive a call, or the spans that a worker delivers. Each process also listens on a port of its
own, where its siblings query decisions, spans and figures. A mark on these calls asks for the records of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from grpc import aio

from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2, inference_pb2_grpc

_MARK: Final = "quire-this-process-alone"
_MARKED: Final = ((_MARK, "1"),)
# A sibling that hangs must not delay the answer for long.
_PATIENCE_S: Final = 1.0

AnswerT = TypeVar("AnswerT")


def asked_by_sibling(context: aio.ServicerContext[Any, Any]) -> bool:
    """Return whether a call asks for the records of this process alone."""
    return any(key == _MARK for key, _ in context.invocation_metadata() or ())


class Siblings:
    """Queries all siblings at once. One that does not answer is left out: its records died with it."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        """`addresses` are HOST:PORT of the own port of each sibling."""
        self._channels = [open_channel(address) for address in addresses]

    async def decisions(self, request: decision_pb2.ListDecisionsRequest) -> list[decision_pb2.ListDecisionsResponse]:
        def ask(channel: aio.Channel) -> Awaitable[decision_pb2.ListDecisionsResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            return stub.ListDecisions(request, timeout=_PATIENCE_S, metadata=_MARKED)

        return await self._all(ask)

    async def traces(self, request: decision_pb2.GetTraceRequest) -> list[decision_pb2.GetTraceResponse]:
        """Return the spans that each sibling has of a trace; a sibling without any is left out."""

        def ask(channel: aio.Channel) -> Awaitable[decision_pb2.GetTraceResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            return stub.GetTrace(request, timeout=_PATIENCE_S, metadata=_MARKED)

        return await self._all(ask)

    async def add_to(self, status: inference_pb2.GetStatusResponse) -> None:
        """Add the requests of each sibling to those of this process."""

        def ask(channel: aio.Channel) -> Awaitable[inference_pb2.GetStatusResponse]:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=_PATIENCE_S, metadata=_MARKED)

        for other in await self._all(ask):
            status.queued_requests += other.queued_requests
            status.running_requests += other.running_requests

    async def aclose(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _all(self, ask: Callable[[aio.Channel], Awaitable[AnswerT]]) -> list[AnswerT]:
        answers = await asyncio.gather(*(_answer(ask(channel)) for channel in self._channels))
        return [answer for answer in answers if answer is not None]


async def _answer(asked: Awaitable[AnswerT]) -> AnswerT | None:
    try:
        return await asked
    except aio.AioRpcError:
        return None
