"""The other router processes on the same ports: what one of them knows alone, it asks the others for.

Calls land on any of them, and so do the spans that workers deliver. Each also listens on a port of its own, where its
siblings ask for decisions, spans and figures; such a question carries a mark, and is answered for one process alone.
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
# One that hangs must not hang the others' answers.
_PATIENCE_S: Final = 1.0

AnswerT = TypeVar("AnswerT")


def asked_by_sibling(context: aio.ServicerContext[Any, Any]) -> bool:
    """Return whether a call is to be answered for this process alone."""
    return any(key == _MARK for key, _ in context.invocation_metadata() or ())


class Siblings:
    """Asks all of them at once. One that does not answer is left out: it has died, and its records with it."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        """`addresses` are HOST:PORT of each one's own port."""
        self._channels = [open_channel(address) for address in addresses]

    async def decisions(self, request: decision_pb2.ListDecisionsRequest) -> list[decision_pb2.ListDecisionsResponse]:
        """Return what each of them has recorded."""

        def ask(channel: aio.Channel) -> Awaitable[decision_pb2.ListDecisionsResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            return stub.ListDecisions(request, timeout=_PATIENCE_S, metadata=_MARKED)

        return await self._all(ask)

    async def traces(self, request: decision_pb2.GetTraceRequest) -> list[decision_pb2.GetTraceResponse]:
        """Return the spans that each of them has of a trace; who has none is left out."""

        def ask(channel: aio.Channel) -> Awaitable[decision_pb2.GetTraceResponse]:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            return stub.GetTrace(request, timeout=_PATIENCE_S, metadata=_MARKED)

        return await self._all(ask)

    async def add_to(self, status: inference_pb2.GetStatusResponse) -> None:
        """Add the requests that each of them has to those of this process."""

        def ask(channel: aio.Channel) -> Awaitable[inference_pb2.GetStatusResponse]:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=_PATIENCE_S, metadata=_MARKED)

        for other in await self._all(ask):
            status.queued_requests += other.queued_requests
            status.running_requests += other.running_requests

    async def aclose(self) -> None:
        """Close the channels to them."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _all(self, ask: Callable[[aio.Channel], Awaitable[AnswerT]]) -> list[AnswerT]:
        answers = await asyncio.gather(*(_answer(ask(channel)) for channel in self._channels))
        return [answer for answer in answers if answer is not None]


async def _answer(asked: Awaitable[AnswerT]) -> AnswerT | None:
    try:
        return await asked
    except aio.AioRpcError:
        return None
