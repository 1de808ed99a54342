"""grpc.health.v1 and reflection: NOT_SERVING until a service is ready and while it drains.

Two more names stand beside the services. `live` is SERVING from the start: a process that waits for others to come back
must not be restarted. `work` is NOT_SERVING also while work stands still at a service that serves on: no readiness
should ask for it, and an alert may.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from common.contracts.errors import Unavailable

V1ALPHA: Final[str] = reflection.SERVICE_NAME
V1: Final = "grpc.reflection.v1.ServerReflection"
_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"


Guard = Callable[[Any], object]
"""Takes the context of a call, and raises for a caller who may not ask."""


# Server reflection, in both versions: newer clients ask for grpc.reflection.v1, grpcio has v1alpha alone.
# The messages of both have the same fields. So v1alpha's servicer answers v1 too, and the description of v1 is that
# of v1alpha under another name.
class _Guarded(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # grpcio-reflection has no types
    def __init__(self, described: Sequence[str], guard: Guard) -> None:
        super().__init__(described)
        self._guard = guard

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer questions about services, once the caller may ask."""
        self._guard(context)
        async for answer in super().ServerReflectionInfo(requests, context):
            yield answer


def add_reflection(services: Sequence[str], server: aio.Server, guard: Guard) -> None:
    """Let a server describe services, and reflection itself, to callers who pass the guard."""
    _describe_v1()
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        _Guarded((*services, V1ALPHA, V1), guard).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    for name in (V1ALPHA, V1):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _describe_v1() -> None:
    """Put the description of v1 into the pool of this process. Idempotent."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _NEW
    file.options.Clear()
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _renamed(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


def _renamed(name: str) -> str:
    return name.replace(f".{_OLD}.", f".{_NEW}.")


_STATUS: TypeAlias = health_pb2.HealthCheckResponse
LIVE: Final = "live"
WORK: Final = "work"


class _ListingServicer(health.aio.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """grpcio's servicer, with the method that it leaves out."""

    async def List(self, request: health_pb2.HealthListRequest, context: object) -> health_pb2.HealthListResponse:
        """Return the status of every name, `live` and the whole server ("") included."""
        statuses = {name: _STATUS(status=status) for name, status in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


def anybody(context: Any) -> None:
    """Let every caller pass."""


class Health:
    """The health of one server as a whole (service name "") and of each of its services; all change together.

    The service name `live` is separate: it is SERVING as long as the process runs, until it drains. So is `work`: it is
    as the others, and NOT_SERVING while any work stands still.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._names = ("", *services)
        self._servicer = _ListingServicer()
        self._ready = self._failing = self._stalled = self._serves_on = False

    async def add_to(self, server: aio.Server, guard: Guard = anybody) -> None:
        """Register health, and reflection for callers who pass the guard; every service is NOT_SERVING at first."""
        await self._set(well=False, works=False)
        await self._servicer.set(LIVE, _STATUS.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        add_reflection((*self._names[1:], health.SERVICE_NAME), server, guard)

    async def ready(self) -> None:
        """Set SERVING, as soon as no background task is failing."""
        self._ready = True
        await self._update()

    async def not_ready(self) -> None:
        """Set NOT_SERVING for a while: something that the service needs is missing."""
        self._ready = False
        await self._update()

    async def failing(self, tasks: tuple[str, ...]) -> None:
        """Set NOT_SERVING while background tasks are failing (`common/process/supervised.py`)."""
        self._failing = bool(tasks)
        await self._update()

    async def stalled(self, reason: str, serves_on: bool = False) -> None:
        """Set NOT_SERVING while the service's work stands still for a reason (`common/process/watchdog.py`).

        A service that `serves_on` is needed all the same: only the name `work` tells.
        """
        self._stalled, self._serves_on = bool(reason), serves_on
        await self._update()

    async def drain(self) -> None:
        """Set NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()

    async def _update(self) -> None:
        well = self._ready and not self._failing
        await self._set(well and (self._serves_on or not self._stalled), well and not self._stalled)

    async def _set(self, well: bool, works: bool) -> None:
        for name in self._names:
            await self._servicer.set(name, _STATUS.SERVING if well else _STATUS.NOT_SERVING)
        await self._servicer.set(WORK, _STATUS.SERVING if works else _STATUS.NOT_SERVING)


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
