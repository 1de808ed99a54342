"""The suite that is attacked: real processes on free ports, and what its router's memory and event loop did."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
from grpc import aio

from bench.lib.tenants import write_tenants
from cli.benchmark.served import peak_rss_mib
from cli.commands.debug import dump, services
from cli.suite.preflight import suite_options
from cli.suite.stack import Stack, free_ports

# A router that is held up answers only after the turn that holds it up.
_DUMP_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.25
ROUTER: Final = "router"
INNOCENT, HOSTILE = "innocent", "hostile"


class Victim:
    """A running suite, and the highest memory of every process so far, of those that ended too."""

    def __init__(self, stack: Stack, folder: Path, keys: Mapping[str, str]) -> None:
        """`keys` are those of the tenants INNOCENT and HOSTILE; none without tenants."""
        self._stack, self._folder, self.keys = stack, folder, keys
        self.host = stack.options.host
        self.grpc_port, self.http_port = stack.options.grpc_port, stack.options.port
        self.peak_rss: dict[str, float] = {}

    @property
    def redis_url(self) -> str:
        return self._stack.redis_url

    @property
    def managers(self) -> list[str]:
        """The names of the KV managers' processes."""
        return self._of_service("kvmanager")

    @property
    def routers(self) -> list[str]:
        """The names of the routers' processes."""
        return self._of_service("router")

    def _of_service(self, service: str) -> list[str]:
        return [name for name, child in self._stack.children.items() if child.program.service == service]

    def channel(self, name: str) -> aio.Channel:
        """Return a channel to one process, as its operator. Of a router it leads to the admin plane."""
        return self._stack.channel(self._stack.children[name].program)

    def addresses_of(self, name: str) -> list[tuple[str, int]]:
        """Return the ports of a process at which others connect: a router's are gRPC and HTTP."""
        options, program = self._stack.options, self._stack.children[name].program
        if program.service == "router":
            return [(self.host, options.grpc_port), (self.host, options.port)]
        host, _, port = program.address.rpartition(":")
        return [(host, int(port))]

    @property
    def restarts(self) -> int:
        return sum(child.restarts for child in self._stack.children.values())

    def pids(self) -> dict[str, int]:
        """Return the processes that run now."""
        return {name: child.pid for name, child in self._stack.children.items() if child.pid is not None}

    def turns(self) -> dict[str, float]:
        """Return the figures of the router's event loop since they were last taken; none of a router that is gone."""
        pid = self.pids().get(ROUTER)
        routers = [each for each in services(self._folder, None) if each.entry["pid"] == pid]
        found = dump(routers[0], _DUMP_SECONDS) if routers else {}
        return dict(found.get("state", {}).get("loop_turns", {}))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow the memory of all processes meanwhile."""
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            self._look()

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        for name, pid in self.pids().items():
            with suppress(psutil.NoSuchProcess):
                self.peak_rss[name] = max(self.peak_rss.get(name, 0.0), peak_rss_mib(pid))


@asynccontextmanager
async def victim(
    options: Sequence[str],
    workers: int,
    tenants: bool = False,
    routers: int = 1,
    drain_timeout: float = 2.0,
    managers: int = 1,
) -> AsyncIterator[Victim]:
    """Run a suite whose router measures its turns, with two tenants or none; `options` are flags of `quire serve`."""
    names = ("--grpc-port", "--port", "--admin-port", "--admin-http-port", "--manager-port")
    ports = free_ports(len(names) + workers + routers + managers - 1)
    used, of_workers = ports[: len(names)], ports[len(names) : len(names) + workers]
    of_routers = ports[len(names) + workers :][:routers] if routers > 1 else []
    of_standbys = ports[len(names) + workers + routers :]
    with tempfile.TemporaryDirectory(prefix="quire-attacks-") as name:
        folder = Path(name)
        flags = [word for name, port in zip(names, used, strict=True) for word in (name, str(port))]
        flags += ["--worker-port", str(of_workers[0])]
        flags += ["--workers", str(workers), "--state-dir", name, "--log-level", "error"]
        flags += ["--drain-timeout", str(drain_timeout)]
        keys = write_tenants(folder / "tenants.toml", {INNOCENT: "", HOSTILE: ""}) if tenants else {}
        flags += ["--tenants", str(folder / "tenants.toml")] if tenants else []
        stack_options = suite_options([*options, *flags], os.environ)
        stack_options = replace(
            stack_options,
            worker_ports=tuple(of_workers),
            own_ports=tuple(of_routers),
            standby_ports=tuple(of_standbys),
            router_flags=(*stack_options.router_flags, "--debug-loop-turns"),
        )
        async with Stack(stack_options, lambda _name, _line: None) as stack:
            yield Victim(stack, folder, keys)
