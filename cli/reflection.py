"""What a gRPC server says of itself: its services and their types, through server reflection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2 as pb

from common.errors import FieldViolation, InvalidRequest, NotFound, Unsupported
from quire.api.status import RpcFailure

# The two differ in nothing but their name; most servers offer one of them.
_SERVICES: Final = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


class Reflection:
    """The types of one server, asked for as they are needed; `pool` has those seen so far."""

    def __init__(
        self, channel: grpc.Channel, timeout: float | None, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """`timeout` in seconds is for each question; `metadata` goes with it. Failed RPCs raise grpc.RpcError."""
        self._channel, self._timeout, self._metadata = channel, timeout, metadata
        self._service = 0
        self.pool = DescriptorPool()

    def services(self) -> list[str]:
        """Return the full names of all services."""
        answer = self._ask(pb.ServerReflectionRequest(list_services=""))
        return sorted(each.name for each in answer.list_services_response.service)

    def load(self, symbol: str) -> None:
        """Put the file that declares a service, message or enum into the pool. Raises NotFound."""
        files = self._files(pb.ServerReflectionRequest(file_containing_symbol=symbol), symbol)
        for each in list(files.values()):
            self._add(each, files)

    def service(self, name: str) -> ServiceDescriptor:
        """Return a service by its full name. Raises NotFound."""
        self.load(name)
        try:
            return self.pool.FindServiceByName(name)
        except KeyError:
            raise NotFound(f"{name} is no service; `quire call describe {name}` shows what it is") from None

    def method(self, given: str) -> MethodDescriptor:
        """Return the method that is meant: `Method`, or `Service/Method` with as much of the package as is needed.

        Raises NotFound, and InvalidRequest where several are meant.
        """
        service, _, method = given.replace("/", ".").rpartition(".")
        found = [
            each
            for name in self.services()
            if not service or name == service or name.endswith(f".{service}")
            for each in self.service(name).methods
            if each.name == method
        ]
        if not found:
            raise NotFound(f"the server has no method {given}; `quire call` lists its services")
        if len(found) > 1:
            names = ", ".join(path_of(each).lstrip("/") for each in found)
            raise InvalidRequest(FieldViolation("METHOD", f"{given} may be any of {names}"))
        return found[0]

    def _files(self, request: pb.ServerReflectionRequest, name: str) -> dict[str, descriptor_pb2.FileDescriptorProto]:
        answer = self._ask(request)
        if answer.HasField("error_response"):
            raise NotFound(f"the server knows no {name}; `quire call` lists its services")
        packed = answer.file_descriptor_response.file_descriptor_proto
        files = map(descriptor_pb2.FileDescriptorProto.FromString, packed)
        return {each.name: each for each in files}

    def _add(
        self, file: descriptor_pb2.FileDescriptorProto, files: dict[str, descriptor_pb2.FileDescriptorProto]
    ) -> None:
        """Add a file after those that it imports; servers may send them along, or not."""
        for name in file.dependency:
            if name not in files and not self._has(name):
                files |= self._files(pb.ServerReflectionRequest(file_by_filename=name), name)
            if not self._has(name):
                self._add(files[name], files)
        if not self._has(file.name):
            self.pool.AddSerializedFile(file.SerializeToString())

    def _has(self, name: str) -> bool:
        try:
            self.pool.FindFileByName(name)
        except KeyError:
            return False
        return True

    def _ask(self, request: pb.ServerReflectionRequest) -> pb.ServerReflectionResponse:
        while True:
            ask = self._channel.stream_stream(
                f"/{_SERVICES[self._service]}/ServerReflectionInfo",
                request_serializer=pb.ServerReflectionRequest.SerializeToString,
                response_deserializer=pb.ServerReflectionResponse.FromString,
            )
            try:
                answers = ask(iter([request]), timeout=self._timeout, metadata=self._metadata)
                return next(cast("Iterable[Any]", answers).__iter__())
            except grpc.RpcError as error:
                if cast("RpcFailure", error).code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
            self._service += 1
            if self._service == len(_SERVICES):
                raise Unsupported("the server has no reflection, which is how `quire call` learns what it offers")


def path_of(method: MethodDescriptor) -> str:
    """Return how a method is called on the wire: /package.Service/Method."""
    return f"/{method.containing_service.full_name}/{method.name}"
