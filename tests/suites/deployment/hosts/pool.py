"""A pool under mutual TLS whose workers are on a host of their own, as docker/worker.compose.yaml starts them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.fault_injection.hosts.network import Network
from bench.fault_injection.hosts.suite import SIMULATED
from bench.fault_injection.streams import RETRY, SimulatedReference, Stream, prompts, until_tokens
from cli.certificates.folder import CertificateFolder, Leaf
from cli.commands import certs
from cli.demo_model import CHECKPOINT
from common.process.local_redis import find_server
from common.process.python import module_command
from common.rpc.roles import Role
from common.rpc.server import open_channel
from gpuworker.simulated.plane import simulated_tokens
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from tests.suites.deployment.docker.conftest import REPOSITORY, compose_alone
from tests.suites.deployment.docker.dockerfile import Dockerfile
from tests.suites.deployment.hosts.containers import Containers

HOSTS: Final = ("redis", "manager", "router", "workers", "client")
NUMBER: Final = 2
_CALL_S: Final = 2.0
# Bounds a hang.
_ANSWER_S: Final = 60.0


def certificates(folder: Path) -> CertificateFolder:
    """Make a CA and a certificate for each role, as `quire certs` does."""
    certs.write(certs.parser().parse_args([str(folder)]))
    return CertificateFolder(folder)


class Pool:
    """Redis, a KV manager and a router on hosts of their own, and containers with workers on one more."""

    def __init__(self, network: Network, containers: Containers, folder: Path) -> None:
        self.network, self._containers, self.folder = network, containers, folder
        self.certificates = certificates(folder / "certs")
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._key = {"QUIRE_POOL_KEY": secrets.token_hex(32)}

    def address(self, host: str, port: int) -> str:
        return f"{self.network.address(host)}:{port}"

    async def start_services(self) -> None:
        redis, own = self.network.address("redis"), self._flags
        redis_url = f"redis://{redis}:6379/0"
        bound = ("--bind", redis, "--port", "6379", "--protected-mode", "no", "--save", "", "--appendonly", "no")
        await self._start("redis", self.network.command("redis", [str(find_server()), *bound]), os.environ)
        manager = module_command("kvmanager", *own("manager", Role.MANAGER), "--redis-url", redis_url)
        await self._start("manager", self.network.command("manager", manager), {**os.environ, **self._key})
        admin = ("--admin-host", self.network.address("router"), "--manager", self.address("manager", 50052))
        flags = (*own("router", Role.ROUTER), *admin, "--model", str(CHECKPOINT), "--redis-url", redis_url)
        router = module_command("router", *flags)
        await self._start("router", self.network.command("router", router), {**os.environ, **self._key})

    def _flags(self, host: str, role: Role) -> tuple[str, ...]:
        leaf = self.certificates.role(role)
        return "--host", self.network.address(host), "--state-dir", str(self.folder / host), *leaf.flags()

    def composed(self, number: int, leaf: Leaf) -> dict[str, dict[str, Any]]:
        """Return the services of the compose file for a host of so many workers with one certificate."""
        variables = {
            "MANAGER": self.address("manager", 50052),
            "ROUTER": self.address("router", 50050),
            "WORKER_ADDRESS": self.network.address("workers"),
            "CERTS_DIR": str(leaf.path),
        }
        file = str(REPOSITORY / "docker/worker.compose.yaml")
        words = ("-f", file, "--profile", f"workers-{number}", "config", "--format", "json")
        done = compose_alone(*words, **variables)
        assert done.returncode == 0, done.stderr
        services: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
        return services

    async def start_worker(self, name: str, service: Mapping[str, Any]) -> None:
        """Run what an engine would run of a service: the image's program, with no flag but the environment of both."""
        if name not in self._processes:
            self._containers.add(name, service["ports"])
        variables = Dockerfile.read("docker/gpuworker.Dockerfile", "cpu").environment | service["environment"]
        for mount in service["volumes"]:
            variables = {key: _within(value, mount["target"], mount["source"]) for key, value in variables.items()}
        kept = {key: value for key, value in variables.items() if key.startswith(("QUIRE_", "OTEL_"))}
        # The tokens of a simulated model are known, so that each can be checked.
        ours = {"QUIRE_SIMULATE": SIMULATED, "QUIRE_KV_BLOCKS": "4096", "QUIRE_STATE_DIR": str(self.folder / name)}
        command = self._containers.command(name, module_command("gpuworker"))
        await self._start(name, command, {**os.environ, **kept, **ours})

    async def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as lines:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=lines, stderr=lines, env=environment
            )

    async def kill(self, name: str) -> None:
        process = self._processes[name]
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def aclose(self) -> None:
        for name in self._processes:
            await self.kill(name)

    def lines(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def ended(self) -> list[str]:
        """Return the services that have ended by themselves."""
        return [name for name, process in self._processes.items() if process.returncode not in (None, -signal.SIGKILL)]

    async def usable(self) -> set[str]:
        """Return the workers that the router may use; none while it does not answer."""
        async with open_channel(self.address("router", 50051)) as channel:
            try:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                status = await stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_S)
            except grpc.aio.AioRpcError:
                return set()
        return {each.worker_id for each in status.workers if each.state == "connected" and each.manager_attached}

    async def health(self, address: str, leaf: Leaf) -> str:
        """Return the health of a worker as it answers the owner of a certificate."""
        async with open_channel(address, identity=leaf.identity(), role=Role.WORKER) as channel:
            asked = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=_ANSWER_S)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    @asynccontextmanager
    async def streams(self, count: int, tokens: int) -> AsyncIterator[None]:
        """Run streams beside what the caller does once all of them have tokens; each token must be the right one."""
        rng, reference = random.Random(count), SimulatedReference(simulated_tokens(CHECKPOINT))
        streams = [Stream(rng.randrange(1 << 30), prompt) for prompt in prompts(rng, count)]
        async with AsyncClient(self.address("router", 50051), retry=RETRY, ca="") as client:
            tasks = [asyncio.create_task(stream.run(client, tokens)) for stream in streams]
            await until_tokens(streams, 4, tasks)
            yield
            await asyncio.gather(*tasks)
        assert [stream.broken for stream in streams if stream.broken] == []
        assert [stream.seed for stream in streams if stream.differing(reference, tokens)] == []


def _within(value: str, target: str, source: str) -> str:
    """Return a path of a container as it is here, where it lies in a mount."""
    return source + value.removeprefix(target) if f"{value}/".startswith(f"{target}/") else value


@asynccontextmanager
async def pool_of_hosts(folder: Path) -> AsyncIterator[Pool]:
    """Run the services, and no worker yet."""
    with Network(HOSTS) as network, Containers(network, "workers") as containers:
        pool = Pool(network, containers, folder)
        try:
            await pool.start_services()
            yield pool
        finally:
            await pool.aclose()
