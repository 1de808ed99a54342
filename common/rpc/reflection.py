"""Server reflection, in both versions: newer clients ask for grpc.reflection.v1, grpcio has v1alpha alone.

The messages of both have the same fields. So v1alpha's servicer answers v1 too, and the description of v1 is that of
v1alpha under another name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA: Final[str] = reflection.SERVICE_NAME
V1: Final = "grpc.reflection.v1.ServerReflection"
_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"


Guard = Callable[[Any], object]
"""Takes the context of a call, and raises for a caller who may not ask."""


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
