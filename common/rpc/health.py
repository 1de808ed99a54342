"""grpc.health.v1 and reflection: NOT_SERVING until a service is ready and while it drains.

One more name, `live`, is SERVING from the start: a process that waits for others to come back must not be restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeAlias

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import Unavailable

_STATUS: TypeAlias = health_pb2.HealthCheckResponse
LIVE: Final = "live"


class Health:
    """The health of one server as a whole (service name "") and of each of its services; all change together.

    The service name `live` is separate: it is SERVING as long as the process runs, until it drains.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._names = ("", *services)
        self._servicer = health.aio.HealthServicer()

    async def add_to(self, server: aio.Server) -> None:
        """Register health and reflection; every service is NOT_SERVING from the first moment."""
        await self._set(_STATUS.NOT_SERVING)
        await self._servicer.set(LIVE, _STATUS.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        described = (*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(described, server)

    async def ready(self) -> None:
        await self._set(_STATUS.SERVING)

    async def not_ready(self) -> None:
        """Set NOT_SERVING for a while: something that the service needs is missing."""
        await self._set(_STATUS.NOT_SERVING)

    async def drain(self) -> None:
        """Set NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in self._names:
            await self._servicer.set(name, status)


async def wait_until_serving(channel: aio.Channel, timeout: float, service: str = "") -> None:
    """Return when the server is SERVING. Raises Unavailable after `timeout` seconds."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        async with asyncio.timeout(timeout):
            while True:
                watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
                if await _watch_until_serving(watch):
                    return
    except TimeoutError:
        raise Unavailable(f"not serving after {timeout:g} s") from None


async def _watch_until_serving(watch: aio.UnaryStreamCall[health_pb2.HealthCheckRequest, _STATUS]) -> bool:
    """Return whether SERVING was seen before the watch broke."""
    try:
        async for response in watch:
            if response.status == _STATUS.SERVING:
                return True
    except aio.AioRpcError:
        return False
    finally:
        watch.cancel()
    return False
