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
from common.group.names import ManagerNames, Resolve, host_and_port, resolved
from common.process.supervised import Supervisor, cancel_and_wait
from common.rpc.server import Dial
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_BACKOFF: Final = Backoff(first=0.1, longest=2.0, jitter=0.5)  # seconds between attempts
_FIRST_LOOK_S: Final = 2.0  # for the first attempt at each address
_RESOLVE_AGAIN_S: Final = 5.0  # while a leader is known
_RESOLVE_SOON_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ManagerState:
    """What a manager says of itself: whether it leads, and in which term.

    All other fields are empty for one that is not `reachable`.

    `since` is when it began to lead or to stand by, or when this process lost it, in seconds of the monotonic clock.
    `group` is what it said last; "": it is in none, or has not said anything yet. `owner` names its process.
    """

    address: str
    reachable: bool = False
    leads: bool = False
    term: int = 0
    since: float = 0.0
    group: str = ""
    owner: str = ""


class LeaderWatch:
    """`leader` is the address of the manager that leads; None while none is known. `on_change` is called after changes.

    A host of the `names`, HOST:PORT, may have several addresses, which are all followed, and which may change. One
    address alone is not followed: it leads, or is the only choice. `managers` has what each one said last, in their
    order. A hung leader still says that it leads: of several that say so, the one of the highest term counts. A leader
    with two addresses is known by the same one as long as it is reachable there.
    """

    def __init__(
        self,
        names: Sequence[str],
        dial: Dial,
        on_change: Callable[[], None] = lambda: None,
        resolve: Resolve = resolved,
        again_s: float = _RESOLVE_AGAIN_S,
    ) -> None:
        self._names, self._dial, self._on_change = ManagerNames(names), dial, on_change
        self._resolve, self._again_s = resolve, again_s
        self._states: dict[str, ManagerState] = {}
        # In the order of the first answers. The value is where an ungrouped manager was met first: it may have several
        # addresses, as on two networks.
        self._heard: dict[str, str] = {}
        self._unresolved = set(self._names.to_resolve)
        self._tried: set[str] = set()
        self._looked, self._named = asyncio.Event(), asyncio.Event()
        self._look_ends = time.monotonic()
        self._supervisor: Supervisor | None = None
        self._resolving: list[asyncio.Task[None]] = []
        self._following: dict[str, asyncio.Task[None]] = {}
        self.leader: str | None = None
        self._owner = ""  # of the leader's process
        self._note_addresses()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of now, one at least."""
        return self._names.addresses

    @property
    def managers(self) -> tuple[ManagerState, ...]:
        """() where there is one address alone."""
        return tuple([self._states[address] for address in self.addresses if address in self._states])

    def leaders(self) -> dict[str, str]:
        """Return an address for each group that is known by now: of its leader, else of any of its managers.

        A manager in no group counts as a group; its name is the address where it was met first.
        """
        found: dict[str, ManagerState] = {}
        for state in self._states.values():
            name = self.group_at(state.address)
            if state.address in self._heard and (name not in found or _before(found[name], state)):
                found[name] = state
        return {name: state.address for name, state in found.items()}

    def group_at(self, address: str) -> str:
        """Return the name, as in `leaders`, of the group of the manager at an address."""
        return self._states[address].group or self._heard.get(address, address)

    def same_process(self, one: str, other: str) -> bool:
        """Return whether one process answers at both addresses, or did when it was heard there last."""
        owners = {self._states[each].owner if each in self._states else "" for each in (one, other)}
        return one == other or (len(owners) == 1 and "" not in owners)

    def heard(self) -> frozenset[str]:
        """Return the addresses that have answered."""
        return frozenset(self._heard)

    def unheard(self) -> list[str]:
        """Return the addresses that have not answered yet: their groups are unknown."""
        return [address for address in self._states if address not in self._heard]

    async def first_look(self) -> None:
        """Return once each address was tried, or some seconds after the start."""
        await self._within_first_look(self._looked)

    async def first_addresses(self) -> None:
        """Return once each name was resolved, or some seconds after the start."""
        await self._within_first_look(self._named)

    async def _within_first_look(self, event: asyncio.Event) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._look_ends - time.monotonic())):
                await event.wait()

    def start(self, supervisor: Supervisor) -> None:
        """Begin to follow the managers. Call `close` at the end."""
        self._look_ends, self._supervisor = time.monotonic() + _FIRST_LOOK_S, supervisor
        self._resolving = [
            supervisor.run_task(f"addresses of {name}", partial(self._resolve_name, name))
            for name in self._names.to_resolve
        ]
        if not self._unresolved:
            self._named.set()
        self._note_addresses()

    async def close(self) -> None:
        await cancel_and_wait(*self._following.values(), *self._resolving)

    async def _resolve_name(self, name: str) -> None:
        """Ask for the addresses of a name again and again, sooner without a leader. One lookup at a time runs."""
        while True:
            with suppress(OSError, UnicodeError):  # the known addresses stay
                hosts = await self._resolve(host_and_port(name)[0])
                # A manager may have been reached meanwhile.
                self._names.take(name, hosts, {each.address for each in self._states.values() if each.reachable})
            self._unresolved.discard(name)
            if not self._unresolved:
                self._named.set()
            self._note_addresses()
            alone = len(self.addresses) == 1
            pause = self._again_s if alone or self.leader is not None else min(_RESOLVE_SOON_S, self._again_s)
            await asyncio.sleep(pause)

    def _note_addresses(self) -> None:
        """Follow new addresses, and leave those that are gone. One address alone is not followed."""
        addresses = self.addresses
        wanted = addresses if len(addresses) > 1 or self._states else ()
        for address in self._states.keys() - set(wanted):
            self._forget(address)
        for address in wanted:
            self._states.setdefault(address, ManagerState(address, since=time.monotonic()))
            if self._supervisor is not None and address not in self._following:
                task = self._supervisor.run_task(f"watch of {address}", partial(self._follow, address))
                self._following[address] = task
        self._look_ended()
        self._find_leader()

    def _forget(self, address: str) -> None:
        del self._states[address]
        self._heard.pop(address, None)
        self._rename(self._known_by(address))
        self._tried.discard(address)
        if address in self._following:
            self._following.pop(address).cancel()

    async def _follow(self, address: str) -> None:
        failures = 0
        while True:
            failures += 1
            with suppress(aio.AioRpcError):
                async with self._dial(address) as channel:
                    stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
                    async for response in stub.WatchLeader(kvmanager_pb2.WatchLeaderRequest()):
                        failures = 0
                        since = time.monotonic() - response.state_seconds
                        said = response.leads, response.term, since, response.group, response.owner
                        state = ManagerState(address, True, *said)
                        self._note_first(state)
                        self._note(state)
                        self._try_ended(address)
            self._try_ended(address)
            last = self._states[address]
            if last.reachable:
                self._note(ManagerState(address, since=time.monotonic(), group=last.group, owner=last.owner))
            await asyncio.sleep(_BACKOFF.pause(max(1, failures), random.random()))

    def _note_first(self, state: ManagerState) -> None:
        """Note where this manager was met first, and that another one has an address that was thought to be its."""
        self._heard[state.address] = self._met_first(state)
        others = [each for each in self._known_by(state.address) if self._states[each].reachable]
        self._rename([each for each in others if self._states[each].owner != state.owner])

    def _met_first(self, state: ManagerState) -> str:
        """Return the address where this manager was met first: the same process answers there, or did last."""
        for address, first in self._heard.items():
            if address != state.address and state.owner and self._states[address].owner == state.owner:
                return first
        first = self._heard.get(state.address, state.address)
        return state.address if first == state.address or self._states[first].reachable else first

    def _known_by(self, address: str) -> list[str]:
        """Return the other addresses of the manager that was met first at this one."""
        return [each for each, first in self._heard.items() if first == address and each != address]

    def _rename(self, addresses: list[str]) -> None:
        """Use the first of these addresses as the name of their manager."""
        for each in addresses:
            self._heard[each] = addresses[0]

    def _try_ended(self, address: str) -> None:
        self._tried.add(address)
        self._look_ended()

    def _look_ended(self) -> None:
        if self._named.is_set() and self._tried.issuperset(self._states):
            self._looked.set()

    def _note(self, state: ManagerState) -> None:
        if state.address in self._states:
            self._states[state.address] = state
            self._find_leader()

    def _find_leader(self) -> None:
        leading = [each for each in self._states.values() if each.leads]
        # Of the highest term the leader of before stays: a leader may have two addresses.
        found = max(leading, key=lambda each: (each.term, each.address == self.leader), default=None)
        leader, owner = (found.address, found.owner) if found is not None else (None, "")
        if (leader, owner) != (self.leader, self._owner):
            self.leader, self._owner = leader, owner
            self._on_change()


def _before(one: ManagerState, other: ManagerState) -> bool:
    """Return whether the other one is rather the leader of the group of both."""
    return (other.leads, other.reachable, other.term) > (one.leads, one.reachable, one.term)
