"""How Quire's errors become gRPC statuses with rich details (google.rpc). `quire/api/status.py` is the way back.

Every status carries ErrorInfo (a reason that names the fault, facts of it, domain "quire"); besides it InvalidRequest
carries BadRequest, Overloaded carries QuotaFailure and RetryInfo, Unavailable carries RetryInfo, and IdentityMismatch
carries PreconditionFailure. Where calls have ids, RequestInfo has that of the call. Where a retry may help, gRPC's own
retries learn from `grpc-retry-pushback-ms` when.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from common.contracts import errors
from common.rpc.call_notes import NOTES
from common.rpc.gone_clients import client_gone
from quire.api.status import DETAILS_KEY, DOMAIN

# Statuses travel as HTTP/2 trailers, of which peers accept 8 KiB by default.
_MAX_MESSAGE_CHARS: Final = 1_000
_MAX_DETAIL_BYTES: Final = 5_000
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"

_CODES: Final[Mapping[type[errors.QuireError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
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


def code_of(error: errors.QuireError) -> grpc.StatusCode:
    """Return the status code of an error: that of the nearest class above it in the tree."""
    return next(_CODES[each] for each in type(error).__mro__ if each in _CODES)


def no_memory() -> errors.Unavailable:
    """Return the error of a request for which no memory is left."""
    return errors.Unavailable("no memory is left for this request; try again, or send a smaller one")


def details_of(error: errors.QuireError) -> list[Message]:
    """Return the google.rpc details of an error, ErrorInfo first."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.facts)
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
    """Return the error as google.rpc.Status, its message cut to the size of trailers."""
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error)[:_MAX_MESSAGE_CHARS])
    for detail in details_of(error):
        status.details.add().Pack(detail)
    return status


async def abort(context: aio.ServicerContext[Any, Any], error: errors.QuireError) -> NoReturn:
    """End a call with the status of an error. Raises AbortError, or CancelledError when the client is gone."""
    status, earlier = to_status(error), tuple(context.trailing_metadata())
    if (notes := NOTES.get()) is not None:
        notes.error = error
        status.details.add().Pack(notes.request_info())
        earlier = notes.trailers(context)
    trailers = (*earlier, (DETAILS_KEY, status.SerializeToString()), *_pushback(error))
    try:
        await context.abort(code_of(error), status.message, trailers)
    except aio.InternalError:
        raise client_gone() from None


def _pushback(error: errors.QuireError) -> tuple[tuple[str, str], ...]:
    """Return when gRPC's retries may come again; nothing where it is up to the caller whether they help."""
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        return ((PUSHBACK_KEY, str(math.ceil(1000 * error.retry_after_s))),)
    return ()


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
