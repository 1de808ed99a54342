"""Injects what fails between hosts: packets that are lost or late, partitions, a host that moves to another address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Final

from bench.fault_injection.failure import InjectionFailed
from bench.fault_injection.hosts.suite import MANAGERS, WORKERS, Suite, until
from bench.fault_injection.plan import CUT_S, Fault, Kind

# Wait until no stream of the round runs any more.
Ended = Callable[[], Awaitable[None]]
_LOSS: Final = 0.1
_DELAY_S: Final = 0.02
_PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.1


class HostsInjector:
    """The Injector of a suite of hosts."""

    def __init__(self, suite: Suite) -> None:
        self._suite, self._network = suite, suite.network

    async def inject(self, fault: Fault, ended: Ended) -> None:
        """Let something fail; return when the cause is over.

        What every stream has a way around lasts until `ended`.
        """
        match fault.kind:
            case Kind.PACKETS_LOST:
                with self._network.loss(_LOSS):
                    await ended()
            case Kind.LINKS_SLOW:
                await self._slow(fault.victim, ended)
            case Kind.CLIENT_WITHOUT_ROUTER:
                with self._network.partition("client", "router"):
                    await asyncio.sleep(CUT_S)
            case Kind.MANAGER_WITHOUT_WORKER:
                await self._given_up(fault.victim)
            case Kind.LEADER_ISOLATED | Kind.LEADER_WITHOUT_REDIS:
                await self._deposed(fault.kind)
            case Kind.WORKER_MOVED:
                self._network.move(fault.victim)
                await ended()
            case _:
                with ExitStack() as cuts:
                    for one, other in _CUTS[fault.kind](fault.victim):
                        cuts.enter_context(self._network.partition(one, other))
                    await ended()

    async def _slow(self, worker: str, ended: Ended) -> None:
        """Delay each connection that is made anew: the leader and a worker come back behind the delay."""
        with self._network.delay(_DELAY_S):
            for host in (await self._suite.leader(), worker):
                await self._suite.kill(host)
                await self._suite.start(host)
            await ended()

    async def _given_up(self, worker: str) -> None:
        """Cut the leader off from a worker until it gives the worker up."""
        leader = await self._suite.leader()

        async def given_up() -> bool:
            attached = await self._suite.attached_to(leader)
            return attached is not None and worker not in attached

        with self._network.partition(leader, worker):
            await until(given_up, f"{leader} to give {worker} up")

    async def _deposed(self, kind: Kind) -> None:
        """Cut the leader off from everything, or from Redis, until the other manager leads all workers."""
        leader = await self._suite.leader()
        (standby,) = set(MANAGERS) - {leader}

        async def deposed() -> bool:
            suite = self._suite
            return await suite.leads(standby) and set(await suite.attached_to(standby) or ()) == set(WORKERS)

        alone = kind is Kind.LEADER_ISOLATED
        with self._network.isolated(leader) if alone else self._network.partition(leader, "redis"):
            await until(deposed, f"{standby} to lead all workers")

    async def whole(self) -> None:
        """Wait until the router may use all workers, and a leader has all of them."""
        await self._suite.until_whole()

        async def attached() -> bool:
            return set(await self._suite.attached()) == set(WORKERS)

        await until(attached, "a leader to have all workers")

    async def leaked(self) -> int:
        """Return how many blocks are still held when nothing runs any more.

        Raises InjectionFailed when the leader lacks the pool of a worker for two minutes.
        """
        end = time.monotonic() + _PATIENCE_S
        while True:
            held = await self._suite.attached()
            whole, late = len(held) == len(WORKERS), time.monotonic() >= end
            if whole and (late or not any(held.values())):
                return sum(held.values())
            if late:
                wanted = f"the leader to have the pools of {', '.join(WORKERS)} within {_PATIENCE_S:g} s"
                raise InjectionFailed(wanted, f"those of {', '.join(sorted(held)) or 'none'}")
            await asyncio.sleep(_POLL_S)


_CUTS: Final[dict[Kind, Callable[[str], list[tuple[str, str]]]]] = {
    Kind.ROUTER_WITHOUT_WORKER: lambda worker: [("router", worker)],
    Kind.MANAGERS_APART: lambda _: [MANAGERS],
    Kind.ROUTER_WITHOUT_REDIS: lambda _: [("router", "redis")],
    Kind.ROUTER_WITHOUT_MANAGERS: lambda _: [("router", manager) for manager in MANAGERS],
}
