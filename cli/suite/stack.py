"""A suite as local processes: Redis, KV manager, GPU workers, router. They start in order, each once it is needed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.suite.process import Child
from cli.suite.programs import REDIS, Program, StackOptions, redis_program, router_address, service_programs
from common.errors import Unavailable
from common.process.local_redis import LocalRedis
from quire.inference.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["Stack", "StackOptions", "free_ports"]

Say = Callable[[str, str], None]

_POLL_SECONDS: Final = 0.05
# Seconds that a service may need beyond its drain_timeout to write its last lines.
_LAST_REPLIES_SECONDS: Final = 5.0
# By service; Redis is none.
_STOP_ORDER: Final = {"router": 0, "gpuworker": 1, "kvmanager": 2, "": 3}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Stack:
    """Starts, watches and stops the processes of one suite; use it as an async context manager.

    `failed` is set when a process ended and is not started again; `failure()` returns its error.
    """

    def __init__(self, options: StackOptions, say: Say) -> None:
        self.options, self._say = options, say
        self.children: dict[str, Child] = {}
        self.failed = asyncio.Event()
        self._failing: Child | None = None
        self.redis_url = options.redis_url or ""
        self.address = router_address(options)
        self.http_url = f"http://{options.host}:{options.http_port}"

    async def __aenter__(self) -> Stack:
        try:
            await self.start()
        except BaseException:  # a cancelled start must leave nothing running either
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every process and wait until it is healthy. Raises Unavailable with the lines of one that is not."""
        if self.options.redis_url is None:
            await self._or_failed(self._start_redis())
        self._say(REDIS, f"ready at {self.redis_url}" if self.redis_url else "none; flags name the workers")
        control, data = service_programs(self.options, self.redis_url)
        for program in (*control, *data):
            await self._start(program)
        for program in (*control, *data):
            await self._or_failed(self._healthy(self.children[program.name]))
        for program in data:
            if program.service == "router":
                await self._or_failed(self._connected(program.address))

    async def stop(self) -> None:
        """Drain the router, then the workers, the manager and Redis: each stops before those that it needs."""
        for step in range(1 + max(_STOP_ORDER.values())):
            group = [child for child in self.children.values() if _STOP_ORDER[child.program.service] == step]
            await asyncio.gather(*(child.stop() for child in group))
        self.children.clear()

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()

    async def _start(self, program: Program) -> Child:
        child = Child(program, self._say, self.options.drain_timeout + _LAST_REPLIES_SECONDS, self._on_failed)
        self.children[program.name] = child
        await child.start()
        return child

    def failure(self) -> Unavailable:
        """Return the error of the process that ended and is not started again."""
        assert self._failing is not None
        return Unavailable(f"{self._failing.program.name} cannot run:\n{_words(self._failing)}")

    def _on_failed(self, child: Child) -> None:
        self._failing = child
        self.failed.set()

    async def _or_failed(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait for a result, or raise the failure of a process that is not started again."""
        wait, failed = asyncio.create_task(waiting), asyncio.create_task(self.failed.wait())
        try:
            await asyncio.wait({wait, failed}, return_when=asyncio.FIRST_COMPLETED)
            if wait.done():
                return wait.result()
            raise self.failure()
        finally:
            for task in (wait, failed):
                task.cancel()
            await asyncio.gather(wait, failed, return_exceptions=True)

    # ------------------------------------------------------------ health

    async def _start_redis(self) -> None:
        server = LocalRedis()
        child = await self._start(redis_program(server))
        deadline = time.monotonic() + self.options.ready_seconds
        while child.pid is None or not await asyncio.to_thread(server.answers, child.pid):
            if time.monotonic() > deadline:
                raise _not_ready(child)
            await asyncio.sleep(_POLL_SECONDS / 5)
        child.ready, self.redis_url = True, server.url

    async def _healthy(self, child: Child) -> None:
        deadline = time.monotonic() + self.options.ready_seconds
        async with grpc.aio.insecure_channel(child.program.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                with suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        child.ready = True
                        return
                await asyncio.sleep(_POLL_SECONDS)
        raise _not_ready(child)

    async def _connected(self, address: str) -> None:
        """Wait until a router sees every worker attached to its manager. A router is healthy with one worker."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.timeout(self.options.ready_seconds):
                while True:
                    status = await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=5.0)
                    usable = [each for each in status.workers if each.state == "connected" and each.manager_attached]
                    if len(usable) >= self.options.workers:
                        return
                    await asyncio.sleep(_POLL_SECONDS)


def _not_ready(child: Child) -> Unavailable:
    return Unavailable(f"{child.program.name} did not become ready; its last lines:\n{_words(child)}")


def _words(child: Child) -> str:
    return "\n".join(f"    {line}" for line in child.last_lines)
