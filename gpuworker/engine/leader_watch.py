"""Follows which of several KV managers leads. Each says so on a stream of its own, and again after each change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from grpc import aio

from common.backoff import Backoff
from common.process.supervised import Supervisor, cancel_and_wait
from common.rpc.server import Dial
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_BACKOFF: Final = Backoff(first=0.1, longest=2.0, jitter=0.5)  # seconds between attempts


class LeaderWatch:
    """`leader` is the address of the manager that leads; None while none is known. `on_change` is called after changes.

    A leader that hangs cannot say that it leads no more: of several that say so, the one of the highest term leads.
    """

    def __init__(self, addresses: Sequence[str], dial: Dial, on_change: Callable[[], None]) -> None:
        self._addresses, self._dial, self._on_change = addresses, dial, on_change
        self._terms: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.leader: str | None = None

    def start(self, supervisor: Supervisor) -> None:
        """Begin to follow the managers. Call `close` at the end."""
        for address in self._addresses:
            self._tasks.append(supervisor.run(f"watch of {address}", partial(self._follow, address)))

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)

    async def _follow(self, address: str) -> None:
        failures = 0
        while True:
            failures += 1
            with suppress(aio.AioRpcError):
                async with self._dial(address) as channel:
                    stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
                    async for response in stub.WatchLeader(kvmanager_pb2.WatchLeaderRequest()):
                        failures = 0
                        self._note(address, response.term if response.leads else None)
            self._note(address, None)
            await asyncio.sleep(_BACKOFF.pause(max(1, failures), random.random()))

    def _note(self, address: str, term: int | None) -> None:
        """Note the term in which a manager leads; None: it does not lead, or cannot be reached."""
        if term is None:
            self._terms.pop(address, None)
        else:
            self._terms[address] = term
        leader = max(self._terms, key=self._terms.__getitem__, default=None)
        if leader != self.leader:
            self.leader = leader
            self._on_change()
