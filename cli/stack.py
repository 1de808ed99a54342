"""The whole suite as local processes: Redis, KV manager, GPU workers and router, started in order, each waited for."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.process import Child, Program
from common.errors import Unavailable
from common.local_redis import LocalRedis
from quire.inference.v1 import inference_pb2, inference_pb2_grpc

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What differs between one suite and another. `worker_ports` has one port a worker.

    `named_workers` is how many of them the router is told by flag (default all); the others it finds through Redis.
    """

    model: Path
    workers: int = 1
    block_size: int = 16
    embedded: bool = False
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    manager_port: int = 50052
    worker_ports: tuple[int, ...] = (50053,)
    redis_url: str | None = None
    state_dir: Path = Path(".quire")
    threads: int | None = None
    named_workers: int | None = None
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    manager_flags: tuple[str, ...] = ()
    log_format: str = "text"
    ready_seconds: float = 300.0


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that were free just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Stack:
    """Starts, watches and stops the processes of one suite; use it as an async context manager."""

    def __init__(self, options: StackOptions, say: Say) -> None:
        self.options, self._say = options, say
        self.redis: LocalRedis | None = None
        self.children: dict[str, Child] = {}
        self.address = f"{options.host}:{options.port}"
        self.http_url = f"http://{options.host}:{options.http_port}"

    async def __aenter__(self) -> Stack:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until each part is healthy; Unavailable, with its last lines, when one is not."""
        redis_url = self.options.redis_url
        if redis_url is None:
            self.redis = LocalRedis()
            self.redis.start()  # on this thread: it ends with the thread that started it
            redis_url = self.redis.url
        self._say("redis", f"ready at {redis_url}")
        control, data = self._programs(redis_url)
        for group in (control, data):  # workers take longest, and start together with the router that waits for them
            for program in group:
                self.children[program.name] = Child(program, self._say)
                await self.children[program.name].start()
        for program in (*control, *data):
            await self._healthy(self.children[program.name])
        await self._connected()

    async def stop(self) -> None:
        """Drain the router first, then the workers, then the manager and Redis, so that nothing loses what it needs."""
        rank = {"router": 0, "kvmanager": 2}
        for step in (0, 1, 2):
            group = [child for name, child in self.children.items() if rank.get(name, 1) == step]
            await asyncio.gather(*(child.stop() for child in group))
        self.children.clear()
        if self.redis is not None:
            self.redis.stop()
            self.redis = None

    # ------------------------------------------------------------ programs

    def _programs(self, redis_url: str) -> tuple[list[Program], list[Program]]:
        workers = [self._worker(index, redis_url) for index in range(self.options.workers)]
        router = self._router(redis_url)
        if self.options.embedded:
            return [], [*workers, router]
        return [self._manager(redis_url)], [*workers, router]

    def _common(self, port: int, redis_url: str) -> tuple[str, ...]:
        options = self.options
        return (
            *("--host", options.host, "--port", str(port), "--redis-url", redis_url),
            *("--block-size", str(options.block_size), "--state-dir", str(options.state_dir)),
            *("--log-format", options.log_format, "--trace-endpoint", self.address),
        )

    def _manager(self, redis_url: str) -> Program:
        port = self.options.manager_port
        flags = (*self._common(port, redis_url), *self.options.manager_flags)
        return Program("kvmanager", "kvmanager.main", flags, f"{self.options.host}:{port}")

    def _worker(self, index: int, redis_url: str) -> Program:
        options, port = self.options, self.options.worker_ports[index]
        threads = options.threads or max(1, ((os.cpu_count() or 2) - 1) // options.workers)
        flags = (
            *self._common(port, redis_url),
            *("--worker-id", f"worker-{index}", "--model", str(options.model), "--threads", str(threads)),
            *options.worker_flags,
        )
        if not options.embedded:
            flags = (*flags, "--manager", f"{options.host}:{options.manager_port}")
        module = "cli.embedded" if options.embedded else "gpuworker.main"
        return Program(f"worker-{index}", module, flags, f"{options.host}:{port}", {"OMP_NUM_THREADS": str(threads)})

    def _router(self, redis_url: str) -> Program:
        options = self.options
        named = options.workers if options.named_workers is None else options.named_workers
        flags = (
            *self._common(options.port, redis_url),
            *("--model", str(options.model), "--http-port", str(options.http_port)),
            *(part for index in range(named) for part in self._worker_flag(index)),
            *options.router_flags,
        )
        return Program("router", "router.main", flags, self.address)

    def _worker_flag(self, index: int) -> tuple[str, str]:
        return "--worker", f"{self.options.host}:{self.options.worker_ports[index]}"

    # ------------------------------------------------------------ health

    async def _healthy(self, child: Child) -> None:
        deadline = time.monotonic() + self.options.ready_seconds
        async with grpc.aio.insecure_channel(child.program.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                with suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                if child.restarts:
                    break  # it ended while it started: its own words say why, and trying again says the same
                await asyncio.sleep(0.05)
        last = "\n".join(f"    {line}" for line in child.last_lines)
        raise Unavailable(f"{child.program.name} did not become ready; its last lines:\n{last}")

    async def _connected(self) -> None:
        """Wait until the router has a stream to every worker: it is healthy with one, and reconnects at its pace."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.timeout(self.options.ready_seconds):
                while True:
                    status = await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=5.0)
                    if sum(worker.state == "connected" for worker in status.workers) >= self.options.workers:
                        return
                    await asyncio.sleep(0.05)
