"""Maps gRPC statuses to Quire's errors. `common/rpc/status.py` maps the other way, and lists the details of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from quire.api import errors

DOMAIN: Final = "quire"
DETAILS_KEY: Final = "grpc-status-details-bin"
# Errors that are made from a message alone, by their reason.
_PLAIN: Final[Mapping[str, type[errors.QuireError]]] = {
    each.reason: each
    for each in (
        *(errors.NotFound, errors.AlreadyExists, errors.DeadlineExceeded, errors.Cancelled, errors.Unsupported),
        *(errors.StaleEpoch, errors.ProtocolViolation, errors.EngineFailure),
        *(errors.Unauthenticated, errors.PermissionDenied),
    )
}
# Errors for statuses that did not come from Quire, but from gRPC itself or a proxy.
_FOREIGN: Final[Mapping[grpc.StatusCode, type[errors.QuireError]]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
}

_CODE_OF_NUMBER: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

# How gRPC's core begins what it says of calls on a connection that it gave up, as where pings were not answered. Their
# code is UNKNOWN, which no service of Quire sends (https://github.com/grpc/grpc/issues/34076).
_CONNECTION_GIVEN_UP: Final = "Stream removed"

DetailT = TypeVar("DetailT", bound=Message)


class RpcFailure(Protocol):
    """The interface of a failed RPC, of grpc.aio or of grpc's API for threads."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def code_from_rpc(error: RpcFailure) -> grpc.StatusCode:
    """Return the code of a failed RPC; UNAVAILABLE for every connection that broke, also where gRPC says UNKNOWN."""
    code = error.code()
    if code is grpc.StatusCode.UNKNOWN and (error.details() or "").startswith(_CONNECTION_GIVEN_UP):
        return grpc.StatusCode.UNAVAILABLE
    return code


def status_from_rpc(error: RpcFailure) -> status_pb2.Status:
    """Return the status of a failed RPC, with the details that the other side sent."""
    packed = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
    if isinstance(packed, bytes):
        return status_pb2.Status.FromString(packed)
    code = code_from_rpc(error)
    return status_pb2.Status(code=code.value[0], message=error.details() or code.name)


def error_from_rpc(error: RpcFailure) -> errors.QuireError:
    """Return the error that a failed RPC stands for, with all details that the other side sent."""
    return error_from_status(status_from_rpc(error))


def retry_after(status: status_pb2.Status) -> float | None:
    """Return the seconds that the other side wants between attempts; None when it gives none."""
    retry = _detail(status, error_details_pb2.RetryInfo)
    return None if retry is None else retry.retry_delay.ToTimedelta().total_seconds()


def error_from_status(status: status_pb2.Status) -> errors.QuireError:
    """Return the error that a status (of an RPC, or inside a message) stands for.

    In an IdentityMismatch `ours` and `theirs` are swapped, so that "here" is always the process that reads it.
    """
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        code = _CODE_OF_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
        foreign = _FOREIGN.get(code)
        return foreign(status.message) if foreign else errors.QuireError(f"{code.name}: {status.message}")
    if plain := _PLAIN.get(info.reason):
        return plain(status.message)
    return _rebuilt(status, info)


def _named(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> errors.QuireError:
    """Return the error of a reason that this version does not know: its code says which kind it is."""
    error = _FOREIGN.get(_CODE_OF_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN), errors.QuireError)(status.message)
    error.reason = info.reason
    return error


def _rebuilt(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> errors.QuireError:
    """Return an error whose class carries more than a message, from the status's details."""
    asked = retry_after(status)
    seconds = 1.0 if asked is None else asked
    if bad := _detail(status, error_details_pb2.BadRequest):
        found = (errors.FieldViolation(each.field, each.description, each.reason) for each in bad.field_violations)
        return errors.InvalidRequest(*found)
    if quota := _detail(status, error_details_pb2.QuotaFailure):
        first = quota.violations[0]
        kind = errors.RateLimited if info.reason == errors.RateLimited.reason else errors.Overloaded
        return kind(errors.QuotaViolation(first.subject, first.description), seconds)
    if info.reason == errors.IdentityMismatch.reason:
        return _rebuilt_mismatch(info)
    if info.reason == errors.ModelNotFound.reason:
        return errors.ModelNotFound(status.message, info.metadata.get("model", ""))
    return errors.Unavailable(status.message, seconds) if asked is not None else _named(status, info)


def _rebuilt_mismatch(info: error_details_pb2.ErrorInfo) -> errors.IdentityMismatch:
    fields = sorted(key.removesuffix(".here") for key in info.metadata if key.endswith(".here"))
    parts = ([info.metadata[f"{name}.{part}"] for part in ("there", "here", "flag")] for name in fields)
    found = (errors.Mismatch(name, *three) for name, three in zip(fields, parts, strict=True))
    return errors.IdentityMismatch(tuple(found))


def _detail(status: status_pb2.Status, kind: type[DetailT]) -> DetailT | None:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            detail = kind()
            packed.Unpack(detail)
            return detail
    return None
