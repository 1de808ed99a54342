"""Follows which of several KV managers leads. Each says so on a stream of its own, and again after each change."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from grpc import aio

from common.backoff import Backoff
from common.process.supervised import Supervisor, cancel_and_wait
from common.rpc.server import Dial
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_BACKOFF: Final = Backoff(first=0.1, longest=2.0, jitter=0.5)  # seconds between attempts
_FIRST_LOOK_S: Final = 2.0  # for the first attempt at each address


@dataclass(frozen=True, slots=True)
class ManagerState:
    """What a manager says of itself: whether it leads, and in which term. None of it where it is not `reachable`.

    `since` is when it began to lead or to stand by, or when this process lost it, in seconds of the monotonic clock.
    `group` is what it said last; "": it is in none, or has not said anything yet.
    """

    address: str
    reachable: bool = False
    leads: bool = False
    term: int = 0
    since: float = 0.0
    group: str = ""


class LeaderWatch:
    """`leader` is the address of the manager that leads; None while none is known. `on_change` is called after changes.

    `managers` has what each one said last, in the order of the addresses.
    A leader that hangs cannot say that it leads no more: of several that say so, the one of the highest term leads.
    A pool may be split over several groups of managers. A worker has the addresses of one group, and follows `leader`;
    a router has those of all groups, and asks `leaders`.
    """

    def __init__(self, addresses: Sequence[str], dial: Dial, on_change: Callable[[], None] = lambda: None) -> None:
        self._addresses, self._dial, self._on_change = addresses, dial, on_change
        now = time.monotonic()
        self._states = {address: ManagerState(address, since=now) for address in self._addresses}
        self._heard: set[str] = set()
        self._tried: set[str] = set()
        self._looked = asyncio.Event()
        self._look_ends = now
        self._tasks: list[asyncio.Task[None]] = []
        self.leader: str | None = None

    @property
    def managers(self) -> tuple[ManagerState, ...]:
        return tuple(self._states.values())

    def leaders(self) -> dict[str, str]:
        """Return an address for each group that is known by now: of its leader, else of any of its managers.

        A manager in no group counts as a group; its name is its address.
        """
        found: dict[str, ManagerState] = {}
        for state in self._states.values():
            name = state.group or state.address
            if state.address in self._heard and (name not in found or _before(found[name], state)):
                found[name] = state
        return {name: state.address for name, state in found.items()}

    def unheard(self) -> list[str]:
        """Return the addresses that have not answered yet: nobody knows which groups they belong to."""
        return [address for address in self._addresses if address not in self._heard]

    async def first_look(self) -> None:
        """Return once each address was tried, or some seconds after the start."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._look_ends - time.monotonic())):
                await self._looked.wait()

    def start(self, supervisor: Supervisor) -> None:
        """Begin to follow the managers. Call `close` at the end."""
        self._look_ends = time.monotonic() + _FIRST_LOOK_S
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
                        self._heard.add(address)
                        since = time.monotonic() - response.state_seconds
                        self._note(ManagerState(address, True, response.leads, response.term, since, response.group))
                        self._try_ended(address)
            self._try_ended(address)
            last = self._states[address]
            if last.reachable:
                self._note(ManagerState(address, since=time.monotonic(), group=last.group))
            await asyncio.sleep(_BACKOFF.pause(max(1, failures), random.random()))

    def _try_ended(self, address: str) -> None:
        self._tried.add(address)
        if self._tried.issuperset(self._addresses):
            self._looked.set()

    def _note(self, state: ManagerState) -> None:
        self._states[state.address] = state
        leading = [each for each in self._states.values() if each.leads]
        leader = max(leading, key=lambda each: each.term).address if leading else None
        if leader != self.leader:
            self.leader = leader
            self._on_change()


def _before(one: ManagerState, other: ManagerState) -> bool:
    """Return whether the other one is rather the leader of the group of both."""
    return (other.leads, other.reachable, other.term) > (one.leads, one.reachable, one.term)
