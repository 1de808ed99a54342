"""What OpenTelemetry's conventions say of calls: which ones failed, and whose fault that is.

A client's span fails with any status but OK. A server's fails where the server is at fault alone, so that no client of
its own accord makes a service look ill.
"""

from __future__ import annotations

from typing import Final

import grpc
from opentelemetry.trace import Span, Status, StatusCode

ERROR_TYPE: Final = "error.type"
SERVER_FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def fail_span(span: Span, code: grpc.StatusCode, message: str) -> None:
    """Give an error to the span of a client."""
    span.set_attribute(ERROR_TYPE, code.name)
    span.set_status(Status(StatusCode.ERROR, message))


def fail_server_span(span: Span, code: grpc.StatusCode, message: str) -> None:
    """Give an error to the span of a server, if the server is at fault; else say in it how it ended."""
    if code in SERVER_FAULTS:
        fail_span(span, code, message)
    else:
        span.set_attribute("quire.ended", message)
