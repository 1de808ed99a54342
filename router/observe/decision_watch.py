"""Decisions as they are made, of this router and of its siblings, in one stream.

Each source goes on when the watcher has taken its last message: one message of each is held here, and no more. A
sibling whose stream has ended is asked again, from the record that was reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from common.decisions.pages import gone, query_of, watch_of
from common.decisions.ring import DecisionRing
from common.decisions.watch import WatcherLimit
from quire.decision.v1 import decision_pb2 as pb
from router.observe.siblings import Siblings

# A message, and whether it is the first of its source.
_Arrival = tuple[pb.WatchDecisionsResponse, bool]


# Seconds until a sibling is asked again whose stream has ended.
_AGAIN_S: Final = 1.0


class DecisionWatch:
    def __init__(self, ring: DecisionRing, siblings: Siblings, again_s: float = _AGAIN_S) -> None:
        self._ring, self._siblings, self.limit = ring, siblings, WatcherLimit()
        self._again_s = again_s

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
        pumps = [_pump(watch_of(self._ring, request), arrivals)]
        pumps += [self._follow(address, request, arrivals) for address in self._siblings.addresses]
        tasks = [asyncio.create_task(pump) for pump in pumps]
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

    async def _follow(self, address: str, request: pb.WatchDecisionsRequest, arrivals: asyncio.Queue[_Arrival]) -> None:
        """Pass on what a sibling decides, in all its streams and lives. At the end of a stream say that it is gone."""
        asked, name, first = pb.WatchDecisionsRequest(), address, True
        asked.CopyFrom(request)
        while True:
            reached = await _pump(self._siblings.watch(address, asked), arrivals, first)
            if reached is not None:
                name = reached.source
                others = [each for each in asked.positions if each.source != name]
                del asked.positions[:]
                asked.positions.extend([*others, reached])
            if first or reached is not None:
                await arrivals.put((gone(name), first and reached is None))
            first = False
            await asyncio.sleep(self._again_s)


async def _pump(
    stream: AsyncGenerator[pb.WatchDecisionsResponse, None], arrivals: asyncio.Queue[_Arrival], first: bool = True
) -> pb.Position | None:
    """Pass on one stream, and return how far it got; None without any message."""
    reached: pb.Position | None = None
    async with aclosing(stream) as responses:
        async for response in responses:
            await arrivals.put((response, first))
            reached, first = response.position, False
    return reached
