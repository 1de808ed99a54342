"""Watches decisions, and goes on where it stopped when the router was away for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final, TypeAlias, cast

import grpc

from quire.api.status import code_from_rpc, error_from_rpc
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc

_PAUSE_S: Final = 1.0
# Statuses after which the router may come back.
_PASSING: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})

Watched: TypeAlias = "pb.WatchDecisionsResponse | str"
"""A response, or a notice in words."""


class Watcher:
    """`begun` makes one whose watch has begun: it sees each record that is made from then on."""

    def __init__(self, channel: grpc.aio.Channel, filters: pb.ListDecisionsRequest, from_manager: bool) -> None:
        self._stub = rpc.DecisionServiceStub(channel)
        names = ("request_id", "kind", "tenant", "worker")
        self._asked = pb.WatchDecisionsRequest(
            from_manager=from_manager, **{name: getattr(filters, name) for name in names}
        )
        self._positions: dict[str, int] = {}
        self._call: Any = None
        self._first: pb.WatchDecisionsResponse | None = None
        self._away = ""

    @classmethod
    async def begun(
        cls, channel: grpc.aio.Channel, filters: pb.ListDecisionsRequest, from_manager: bool, may_wait: bool = False
    ) -> Watcher:
        """Raises the call's AioRpcError when no watch can begin. `may_wait`: one that may begin later says so first."""
        watcher = cls(channel, filters, from_manager)
        try:
            watcher._first = await watcher._open()
        except grpc.aio.AioRpcError as error:
            if not may_wait or error.code() not in _PASSING:
                raise
            watcher._away = _words_of(error)
        return watcher

    async def responses(self) -> AsyncGenerator[Watched, None]:
        """Yield what comes. A router that is away is asked again, from the positions that were reached."""
        if self._first is not None:
            yield self._taken(self._first)
        elif self._away:
            yield self._away
            await asyncio.sleep(_PAUSE_S)
        while True:
            try:
                if self._call is None:
                    yield self._taken(await self._open())
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    yield self._taken(response)
            except grpc.aio.AioRpcError as error:
                if code_from_rpc(error) not in _PASSING:
                    raise
                if self._call is not None:
                    yield _words_of(error)
            self._call = None
            await asyncio.sleep(_PAUSE_S)

    async def _open(self) -> pb.WatchDecisionsResponse:
        """Begin a watch, and return its first response."""
        del self._asked.positions[:]
        self._asked.positions.extend(pb.Position(source=name, sequence=at) for name, at in self._positions.items())
        call = self._stub.WatchDecisions(self._asked)
        first = await call.read()
        if first is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "ended")
        self._call = call
        return cast("pb.WatchDecisionsResponse", first)

    def _taken(self, response: pb.WatchDecisionsResponse) -> pb.WatchDecisionsResponse:
        position = response.position
        if response.lost_because and not position.sequence:
            self._positions.pop(position.source, None)
        else:
            self._positions[position.source] = position.sequence
        return response


def _words_of(error: grpc.aio.AioRpcError) -> str:
    return f"no answer, trying again: {str(error_from_rpc(error)).partition(chr(10))[0]}"
