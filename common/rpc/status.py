"""The one mapping between Quire's errors and gRPC statuses, both ways, with rich details (google.rpc).

Every status carries ErrorInfo (reason, domain "quire"); besides it InvalidRequest carries BadRequest, Overloaded
carries QuotaFailure and RetryInfo, Unavailable carries RetryInfo, and IdentityMismatch carries PreconditionFailure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from common import errors

DOMAIN: Final = "quire"
DETAILS_KEY: Final = "grpc-status-details-bin"
# Statuses travel as HTTP/2 trailers, of which peers accept 8 KiB by default.
_MAX_MESSAGE_CHARS: Final = 1_000
_MAX_DETAIL_BYTES: Final = 5_000

_CODES: Final[Mapping[type[errors.QuireError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.IdentityMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QuireError: grpc.StatusCode.INTERNAL,
}
# Errors that are made from a message alone, by their reason.
_PLAIN: Final[Mapping[str, type[errors.QuireError]]] = {
    each.reason: each
    for each in (
        *(errors.NotFound, errors.AlreadyExists, errors.DeadlineExceeded, errors.Cancelled, errors.Unsupported),
        *(errors.StaleEpoch, errors.ProtocolViolation, errors.EngineFailure),
    )
}
# What a status means that did not come from Quire (gRPC itself, a proxy).
_FOREIGN: Final[Mapping[grpc.StatusCode, type[errors.QuireError]]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
}

_CODE_OF_NUMBER: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

DetailT = TypeVar("DetailT", bound=Message)


def code_of(error: errors.QuireError) -> grpc.StatusCode:
    """Return the status code of an error: that of the nearest class above it in the tree."""
    return next(_CODES[each] for each in type(error).__mro__ if each in _CODES)


def details_of(error: errors.QuireError) -> list[Message]:
    """Return the google.rpc details of an error, ErrorInfo first."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    match error:
        case errors.InvalidRequest():
            return [info, _bad_request(error.violations)]
        case errors.Overloaded(violation=quota, retry_after_s=seconds):
            violation = error_details_pb2.QuotaFailure.Violation(subject=quota.subject, description=quota.description)
            return [info, error_details_pb2.QuotaFailure(violations=[violation]), _retry(seconds)]
        case errors.Unavailable(retry_after_s=seconds):
            return [info, _retry(seconds)]
        case errors.IdentityMismatch():
            return _mismatch(info, error.mismatches)
    return [info]


def to_status(error: errors.QuireError) -> status_pb2.Status:
    """Return the error as google.rpc.Status, its message cut to what trailers hold."""
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error)[:_MAX_MESSAGE_CHARS])
    for detail in details_of(error):
        status.details.add().Pack(detail)
    return status


async def abort(context: aio.ServicerContext[Any, Any], error: errors.QuireError) -> NoReturn:
    """End the RPC of `context` with the status of `error`."""
    status = to_status(error)
    trailers = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code_of(error), status.message, trailers)


class RpcFailure(Protocol):
    """What a failed RPC knows, be it one of grpc.aio or of grpc's API for threads."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def status_from_rpc(error: RpcFailure) -> status_pb2.Status:
    """Return the status that a failed RPC ended with, and the details where the other side sent some."""
    packed = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
    if isinstance(packed, bytes):
        return status_pb2.Status.FromString(packed)
    message = error.details() or error.code().name
    return status_pb2.Status(code=error.code().value[0], message=message)


def error_from_rpc(error: RpcFailure) -> errors.QuireError:
    """Return what a failed RPC means here, with everything that the other side said; see error_from_status."""
    return error_from_status(status_from_rpc(error))


def retry_after(status: status_pb2.Status) -> float | None:
    """Return after how many seconds the other side wants to be asked again; None when it did not say."""
    retry = _detail(status, error_details_pb2.RetryInfo)
    return None if retry is None else retry.retry_delay.ToTimedelta().total_seconds()


def error_from_status(status: status_pb2.Status) -> errors.QuireError:
    """Return the error that a status (of an RPC, or inside a message) stands for.

    In an IdentityMismatch `ours` and `theirs` are swapped, so that "here" is always the process that reads it.
    """
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        code = _CODE_OF_NUMBER[status.code]
        foreign = _FOREIGN.get(code)
        return foreign(status.message) if foreign else errors.QuireError(f"{code.name}: {status.message}")
    if plain := _PLAIN.get(info.reason):
        return plain(status.message)
    return _rebuilt(status, info)


def _rebuilt(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> errors.QuireError:
    """Return an error whose class carries more than a message, from its details."""
    asked = retry_after(status)
    seconds = 1.0 if asked is None else asked
    if bad := _detail(status, error_details_pb2.BadRequest):
        found = (errors.FieldViolation(each.field, each.description, each.reason) for each in bad.field_violations)
        return errors.InvalidRequest(*found)
    if quota := _detail(status, error_details_pb2.QuotaFailure):
        first = quota.violations[0]
        return errors.Overloaded(errors.QuotaViolation(first.subject, first.description), seconds)
    if info.reason == errors.IdentityMismatch.reason:
        return _rebuilt_mismatch(info)
    return errors.Unavailable(status.message, seconds) if asked is not None else errors.QuireError(status.message)


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


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromTimedelta(timedelta(seconds=seconds))
    return info


def _bad_request(violations: Iterable[errors.FieldViolation]) -> error_details_pb2.BadRequest:
    """Return the violations, as many as fit into trailers; the last one says how many do not."""
    detail, left_out = error_details_pb2.BadRequest(), 0
    for violation in violations:
        packed = error_details_pb2.BadRequest.FieldViolation(
            field=violation.field, description=violation.description, reason=violation.reason
        )
        if detail.ByteSize() + packed.ByteSize() > _MAX_DETAIL_BYTES:
            left_out += 1
        else:
            detail.field_violations.append(packed)
    if left_out:
        detail.field_violations.add(field="...", description=f"{left_out} more are wrong")
    return detail


def _mismatch(info: error_details_pb2.ErrorInfo, mismatches: Iterable[errors.Mismatch]) -> list[Message]:
    failure = error_details_pb2.PreconditionFailure()
    for each in mismatches:
        failure.violations.add(type=errors.IdentityMismatch.reason, subject=each.field, description=str(each))
        for part, value in (("here", each.ours), ("there", each.theirs), ("flag", each.flag)):
            info.metadata[f"{each.field}.{part}"] = value
    return [info, failure]
