"""A suite with each service on a host of its own: Redis, two KV managers, two simulated workers, a router, a client."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc

from bench.fault_injection.failure import InjectionFailed, patience
from bench.fault_injection.hosts.network import Network
from bench.fault_injection.streams import RETRY, SimulatedReference, Stream, until_tokens
from cli.demo_model import CHECKPOINT
from common.process.local_redis import find_server
from common.process.python import module_command
from common.rpc.server import open_channel
from gpuworker.simulated.plane import simulated_tokens
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

WORKERS: Final = ("worker-0", "worker-1")
MANAGERS: Final = ("manager-a", "manager-b")
HOSTS: Final = ("redis", *MANAGERS, *WORKERS, "router", "client")
# Bounds a hang; nothing that a test asserts depends on it.
PATIENCE: Final = 240.0
# What does not answer is asked again, so this bounds only what a service that is cut off holds up.
_CALL_S: Final = 30.0
_POLL_S: Final = 0.1
_LINES: Final = 8_000  # characters of what a service said that has ended
SIMULATED: Final = "base=8ms,decode=4us,prefill=2us"


class Suite:
    """The services of a network by host, and a client of the router."""

    def __init__(self, network: Network, folder: Path, simulate: str) -> None:
        """The services write to files in `folder`. `simulate` is what a step of a worker costs."""
        self.network, self._folder, self._simulate = network, folder, simulate
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._reference = SimulatedReference(simulated_tokens(CHECKPOINT))
        # A process that crashes says where.
        self._environment = {**os.environ, "QUIRE_POOL_KEY": secrets.token_hex(32), "PYTHONFAULTHANDLER": "1"}

    def address(self, host: str, port: int) -> str:
        return f"{self.network.address(host)}:{port}"

    @property
    def router(self) -> str:
        return self.address("router", 50051)

    async def start(self, host: str) -> None:
        """Start the service of a host. Its lines go to a file, those of a restart too."""
        command = self.network.command(host, self._command(host))
        with (self._folder / f"{host}.log").open("ab") as lines:
            self._processes[host] = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=lines, stderr=lines, env=self._environment
            )

    async def kill(self, host: str) -> None:
        process = self._processes.pop(host)
        if process.returncode is None:
            process.kill()
        await process.wait()

    def _all_run(self) -> None:
        """Raise InjectionFailed when a service has ended by itself, and print what it said."""
        for host, process in self._processes.items():
            if process.returncode is not None:
                print(self.lines(host)[-_LINES:], flush=True)
                raise InjectionFailed("every service to run", f"{host} ended with {process.returncode}")

    async def aclose(self) -> None:
        for host in tuple(self._processes):
            await self.kill(host)

    def lines(self, host: str) -> str:
        return (self._folder / f"{host}.log").read_text(errors="replace")

    def _command(self, host: str) -> list[str]:
        # A worker that listens on every address finds out, and tells the manager, at which one it is now.
        listens = "0.0.0.0" if host in WORKERS else self.network.address(host)
        own = ("--insecure", "--host", listens, "--state-dir", str(self._folder / host))
        redis_url = f"redis://{self.address('redis', 6379)}/0"
        managers = ",".join(self.address(each, 50052) for each in MANAGERS)
        if host == "redis":
            bound = ("--bind", self.network.address(host), "--port", "6379", "--protected-mode", "no")
            return [str(find_server()), *bound, "--save", "", "--appendonly", "no"]
        if host in MANAGERS:
            grouped = ("--port", "50052", "--redis-url", redis_url, "--group", "pool")
            return module_command("kvmanager", *own, *grouped)
        if host in WORKERS:
            named = ("--worker-id", host, "--port", "50053", "--manager", managers, "--model", str(CHECKPOINT))
            return module_command("gpuworker", *own, *named, "--simulate", self._simulate, "--kv-blocks", "4096")
        ports = ("--grpc-port", "50051", "--admin-host", self.network.address(host))
        flags = (*own, *ports, "--model", str(CHECKPOINT), "--redis-url", redis_url, "--manager", managers)
        return module_command("router", *flags)

    # ------------------------------------------------------------ what the services say

    async def usable(self) -> set[str]:
        """Return the workers that the router may use; none while it does not answer."""
        async with open_channel(self.router) as channel:
            try:
                status = await inference_pb2_grpc.InferenceServiceStub(channel).GetStatus(
                    pb.GetStatusRequest(), timeout=_CALL_S
                )
            except grpc.aio.AioRpcError:
                return set()
        return {each.worker_id for each in status.workers if each.state == "connected" and each.manager_attached}

    async def leaders(self) -> list[str]:
        """Return the managers that lead, or think so, those that answer."""
        return [host for host in MANAGERS if await self.leads(host)]

    async def leads(self, host: str) -> bool:
        async with open_channel(self.address(host, 50052)) as channel:
            watch = kvmanager_pb2_grpc.KvManagerServiceStub(channel).WatchLeader(
                kvmanager_pb2.WatchLeaderRequest(), timeout=_CALL_S
            )
            try:
                async for state in watch:
                    return bool(state.leads)
            except grpc.aio.AioRpcError:
                return False
            finally:
                watch.cancel()
        return False

    async def leader(self) -> str:
        """Return the manager that leads; wait until there is one, and one alone."""
        found: list[str] = []
        async with patience(PATIENCE, "one manager to lead", lambda: f"{', '.join(found) or 'none'} leads"):
            while len(found := await self.leaders()) != 1:  # noqa: ASYNC110 - they are asked over the network
                await asyncio.sleep(_POLL_S)
        return found[0]

    async def attached(self) -> dict[str, int]:
        """Return the workers that the leader has sessions with, and the blocks that each one holds."""
        return await self.attached_to(await self.leader()) or {}

    async def attached_to(self, manager: str) -> dict[str, int] | None:
        """Return the same of a manager; None where it does not answer, or does not lead."""
        async with open_channel(self.address(manager, 50052)) as channel:
            stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
            try:
                pools = (await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=_CALL_S)).pools
            except grpc.aio.AioRpcError:  # it leads no longer
                return None
        return {pool.worker_id: pool.in_use + pool.leased + pool.pinned for pool in pools}

    async def until_whole(self) -> None:
        """Wait until the router may use every worker."""
        usable = set[str]()

        async def whole() -> bool:
            nonlocal usable
            self._all_run()
            usable = await self.usable()
            return usable == set(WORKERS)

        await until(whole, "the router to use every worker", lambda: f"it uses {', '.join(sorted(usable)) or 'none'}")

    async def until_free(self) -> None:
        """Wait until every worker is attached, and no block is held."""

        async def free() -> bool:
            return await self.attached() == dict.fromkeys(WORKERS, 0)

        await until(free, "every worker to be attached, and no block to be held")

    # ------------------------------------------------------------ load

    @asynccontextmanager
    async def streams(self, count: int, tokens: int) -> AsyncIterator[None]:
        """Run streams, and what the caller does once all of them have tokens; every token must be the right one."""
        rng = random.Random(count)
        streams = [Stream(rng.randrange(1 << 30), _prompt(rng)) for _ in range(count)]
        async with AsyncClient(self.router, retry=RETRY, ca="") as client:
            tasks = [asyncio.create_task(stream.run(client, tokens, PATIENCE)) for stream in streams]
            await until_tokens(streams, 4, tasks)
            self.running = tasks
            yield
            await asyncio.gather(*tasks)
        broken = [stream.broken for stream in streams if stream.broken]
        assert not broken, broken
        differing = [stream for stream in streams if stream.differing(self._reference, tokens)]
        assert not differing, differing


def _prompt(rng: random.Random) -> Sequence[int]:
    return [40 + rng.randrange(2)] * 32 + rng.choices(range(8, 200), k=rng.randrange(8, 64))


async def until(
    holds: Callable[[], Awaitable[bool]], expected: str, came: Callable[[], str] = lambda: "not so"
) -> None:
    """Return once a condition holds that other processes bring about. Raises InjectionFailed, with what came."""
    async with patience(PATIENCE, expected, came):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def suite_of_hosts(folder: Path, simulate: str = SIMULATED) -> AsyncIterator[Suite]:
    """Run all services, each on its host."""
    with Network(HOSTS) as network:
        suite = Suite(network, folder, simulate)
        try:
            for host in HOSTS[:-1]:
                await suite.start(host)
            await suite.until_whole()
            yield suite
        finally:
            await suite.aclose()
