"""Decisions as they are made, of this router and of its siblings, in one stream.

Each source goes on when the watcher has taken its last message: one message of each is held here, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from common.decisions.pages import gone, query_of, watch_of
from common.decisions.ring import DecisionRing
from common.decisions.watch import WatcherLimit
from quire.decision.v1 import decision_pb2 as pb
from router.observe.siblings import Siblings

# A message, and whether it is the first of its source.
_Arrival = tuple[pb.WatchDecisionsResponse, bool]


class DecisionWatch:
    def __init__(self, ring: DecisionRing, siblings: Siblings) -> None:
        self._ring, self._siblings, self.limit = ring, siblings, WatcherLimit()

    async def stream(
        self, request: pb.WatchDecisionsRequest, alone: bool = False
    ) -> AsyncGenerator[pb.WatchDecisionsResponse, None]:
        """Yield the records of this process alone, or of all routers on its ports. Raises Overloaded."""
        query_of(request)
        if alone:
            async with aclosing(watch_of(self._ring, request)) as own:
                async for response in own:
                    yield response
            return
        with self.limit:
            async with aclosing(self._merged(request)) as merged:
                async for response in merged:
                    yield response

    async def _merged(self, request: pb.WatchDecisionsRequest) -> AsyncGenerator[pb.WatchDecisionsResponse, None]:
        arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(maxsize=1)
        streams = [(self._ring.source, watch_of(self._ring, request)), *self._siblings.watches(request)]
        tasks = [asyncio.create_task(_pump(name, stream, arrivals)) for name, stream in streams]
        unheard, named = len(tasks), {each.source for each in request.positions}
        try:
            while True:
                response, first = await arrivals.get()
                named.discard(response.position.source)
                yield response
                unheard -= first
                if not unheard:
                    for source in sorted(named):
                        yield gone(source)
                    named.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    name: str, stream: AsyncGenerator[pb.WatchDecisionsResponse, None], arrivals: asyncio.Queue[_Arrival]
) -> None:
    """Pass on one source, and at its end say so. `name` is its address where it has said nothing yet."""
    first = True
    async with aclosing(stream) as responses:
        async for response in responses:
            await arrivals.put((response, first))
            name, first = response.position.source, False
    await arrivals.put((gone(name), first))
