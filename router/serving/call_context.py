"""The context of a gRPC call: arrival, deadline, trace."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from grpc import aio
from opentelemetry import trace

from common.clock import Clock
from common.telemetry import traceparent_of
from router.ports import CallContext

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
# Calls without a deadline report a time left of decades.
_NO_DEADLINE_SECONDS: Final = 30 * 86_400.0


def call_context(clock: Clock, context: Context) -> CallContext:
    now, left = clock.monotonic(), context.time_remaining()
    deadline = now + left if left is not None and left < _NO_DEADLINE_SECONDS else None
    return CallContext(now, deadline, _traceparent(context))


def metadata_of(context: Context, key: str) -> str:
    """Return one text of the client's metadata; empty if there is none."""
    sent = dict(context.invocation_metadata() or ()).get(key, "")
    return sent if isinstance(sent, str) else ""


def _traceparent(context: Context) -> str:
    """Return the traceparent of this call's span when there is one, else that of the client."""
    if trace.get_current_span().get_span_context().is_valid:
        return traceparent_of()
    return metadata_of(context, "traceparent")
