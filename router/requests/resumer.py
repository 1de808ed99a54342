"""Goes on with a request that another router began, for the APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from common.contracts.clock import Clock
from quire.inference.v1 import inference_pb2 as pb
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.contracts.ports import CallContext, Resumed
from router.requests.frontend import RouterFrontend
from router.requests.resumption import Resumption
from router.workers.pool import WorkerPool


class RequestResumer:
    """The Resumer over a pool of workers and a frontend."""

    def __init__(self, resumption: Resumption, frontend: RouterFrontend) -> None:
        self._resumption, self._frontend = resumption, frontend

    @classmethod
    def over(cls, pool: WorkerPool, frontend: RouterFrontend, clock: Clock) -> RequestResumer:
        return cls(Resumption(pool, clock), frontend)

    async def resumed(self, request: pb.GenerateRequest, call: CallContext, again: bool = False) -> Resumed:
        found = await self._resumption.find(request, call, again)

        def events(read: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
            return self._frontend.resume(replace(found, request=read))

        return Resumed(found.request, events)
