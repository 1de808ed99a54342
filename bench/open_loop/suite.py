"""The suite of the load benchmark, whose processes report their processor time, and the clients' processes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import psutil

from bench.open_loop.plan import Plan, Seen
from cli.suite.preflight import suite_options
from cli.suite.programs import leaf_of, metrics_addresses
from cli.suite.stack import Stack, free_ports
from common.process import die_with_parent
from common.process.python import module_command
from common.rpc.roles import Role

_AHEAD_SECONDS = 0.5
CLIENTS = "clients"
SPARE_CLIENTS = 2


class LoadSuite:
    """A running suite and client processes. `folder` lasts as long as they do."""

    def __init__(self, stack: Stack, clients: Sequence[asyncio.subprocess.Process], folder: Path) -> None:
        self.stack, self._clients, self._folder = stack, clients, folder
        self.started = 0.0  # when the arrivals of the last run began
        self.router = stack.address
        self.http = f"{stack.options.host}:{stack.options.port}"
        self.worker = f"{stack.options.host}:{stack.options.worker_ports[0]}"
        leaf = leaf_of(stack.options, Role.ROUTER)
        self.certs = "" if leaf is None else str(leaf.path)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time so far of each role: router, kvmanager, worker, redis; user and system."""
        spent: dict[str, float] = {}
        for name, child in self.stack.children.items():
            if child.pid is not None:
                times = psutil.Process(child.pid).cpu_times()
                role = name.partition("-")[0]
                spent[role] = spent.get(role, 0.0) + times.user + times.system
        return spent

    def pin(self, cores: Mapping[str, Sequence[int]]) -> None:
        """Bind the processes of each role, the clients' among them, to these cores."""
        for name, child in self.stack.children.items():
            if child.pid is not None and (wanted := cores.get(name.partition("-")[0])):
                psutil.Process(child.pid).cpu_affinity(list(wanted))
        for client in self._clients:
            if wanted := cores.get(CLIENTS):
                psutil.Process(client.pid).cpu_affinity(list(wanted))

    def kill_worker(self, index: int) -> None:
        """End a worker as a crash would (SIGKILL); the suite starts it again."""
        pid = self.stack.children[f"worker-{index}"].pid
        assert pid is not None, "the worker runs"
        os.kill(pid, signal.SIGKILL)

    async def counted(self, name: str) -> float:
        """Return the sum of a counter over all routers; 0 where there is none of this name."""
        addresses = metrics_addresses(self.stack.options)
        texts = [await asyncio.to_thread(_metrics, address) for address in addresses]
        lines = [line for text in texts for line in text.splitlines()]
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def run(self, plan: Plan, *beside: Plan) -> list[Seen]:
        """Run a plan on all clients, and plans `beside` it on a spare one each; return each plan's traces.

        All begin at the same time, half a second from now.
        """
        clients = self._clients[:-SPARE_CLIENTS]
        self.started = start = time.monotonic() + _AHEAD_SECONDS
        plans = [replace(plan, start=start, client=index, clients=len(clients)) for index in range(len(clients))]
        plans += [replace(each, start=start) for each in beside]
        files = [str(self._folder / f"seen-{index}.npz") for index in range(len(plans))]
        plans = [replace(each, results=file) for each, file in zip(plans, files, strict=True)]
        await asyncio.gather(*(_run(*each) for each in zip(self._clients, plans, strict=False)))
        seen = [Seen.load(file) for file in files]
        return [Seen.joined(seen[: len(clients)]), *seen[len(clients) :]]


def _metrics(address: str) -> str:
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics") as answer:
        return str(answer.read(), "utf-8")


async def _run(client: asyncio.subprocess.Process, plan: Plan) -> None:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{plan.to_json()}\n".encode())
    await client.stdin.drain()
    if not await client.stdout.readline():
        raise RuntimeError(f"a client process ended with status {await client.wait()}; its words are above")


@asynccontextmanager
async def load_suite(
    options: Sequence[str], clients: int, router_flags: Sequence[str] = (), workers: int = 1, routers: int = 1
) -> AsyncIterator[LoadSuite]:
    """Run a suite on free ports, `clients` processes and two spare ones; `options` are flags of `quire serve`.

    Raises InvalidConfig for bad ones, Unavailable, with the last lines of a process, when it does not start.
    """
    names = ("--grpc-port", "--port", "--admin-port", "--admin-http-port", "--manager-port")
    ports = free_ports(len(names) + workers + routers)
    used, of_workers, of_routers = ports[: len(names)], ports[len(names) :][:workers], ports[len(names) + workers :]
    with tempfile.TemporaryDirectory(prefix="quire-load-") as folder:
        flags = [word for name, port in zip(names, used, strict=True) for word in (name, str(port))]
        flags += ["--worker-port", str(of_workers[0])]
        flags += ["--workers", str(workers), "--state-dir", folder, "--log-level", "warning"]
        flags += ["--routers", str(routers)] if routers > 1 else []
        stack_options = suite_options([*options, *flags], os.environ)
        router_flags = (*stack_options.router_flags, *router_flags)
        own_ports = tuple(of_routers) if routers > 1 else ()
        stack_options = replace(
            stack_options, router_flags=router_flags, worker_ports=tuple(of_workers), own_ports=own_ports
        )
        async with (
            Stack(stack_options, lambda _name, _line: None) as stack,
            _clients(clients + SPARE_CLIENTS) as processes,
        ):
            yield LoadSuite(stack, processes, Path(folder))


@asynccontextmanager
async def _clients(count: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    command = die_with_parent.command(module_command("bench.open_loop.client"))
    pipe = asyncio.subprocess.PIPE
    made = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        for client in made:
            assert client.stdout is not None
            await client.stdout.readline()  # it has imported everything
        yield made
    finally:
        for client in made:
            if client.returncode is None:
                client.kill()
            await client.wait()
