"""The context of a gRPC call: arrival, deadline, trace, caller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from grpc import aio
from opentelemetry import trace

from common.contracts.clock import Clock
from common.rpc.call_notes import NOTES
from common.telemetry import traceparent_of
from router.answers.text.encoder import works_for
from router.api.shared.metering import UNLIMITED, Meter
from router.contracts.ports import Authenticator, CallContext
from router.contracts.session_ids import sent_session
from router.requests.request_ids import is_own_choice
from router.tenants.tenancy import Caller

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
# Calls without a deadline report a time left of decades.
_NO_DEADLINE_SECONDS: Final = 30 * 86_400.0
# The part of a client's time, and at most so many seconds, in which it gets what there is at its deadline.
_MARGIN, _MOST_MARGIN_SECONDS = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class Calls:
    """Reads the context of calls; the servicers of all gRPC services share one. `meter` charges the callers."""

    clock: Clock
    authenticator: Authenticator
    meter: Meter = UNLIMITED

    def caller(self, context: Context) -> Caller:
        """Return who calls, and for whom texts are read. Raises Unauthenticated or PermissionDenied."""
        caller = self.authenticator.caller(metadata_of(context, "authorization"), host_of(context.peer()))
        if (notes := NOTES.get()) is not None:
            notes.owner = caller.owner
        works_for(caller.tenant)
        return caller

    def context(self, context: Context) -> CallContext:
        """Return the context of a call, with the ids that it was given. Raises as `caller` does."""
        now, left = self.clock.monotonic(), context.time_remaining()
        deadline = now + left - _margin(left) if left is not None and left < _NO_DEADLINE_SECONDS else None
        state = metadata_of(context, "tracestate")
        sent = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        called, session = _traceparent(context), sent_session(sent.get)
        made = CallContext(now, deadline, called, self.caller(context), session_id=session, tracestate=state)
        if (notes := NOTES.get()) is None:
            return made
        return replace(made, request_id=notes.call_id, correlation_id=notes.recorded_id)


def _margin(left: float) -> float:
    """Return the seconds before its deadline at which a call ends, so that its answer reaches the client in time."""
    return min(_MARGIN * left, _MOST_MARGIN_SECONDS)


def host_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer, without its port: ipv4:127.0.0.1:5000 -> 127.0.0.1."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else scheme


def note_id(chosen: str) -> None:
    """Let a call go by the id that its message gives, if it may have that."""
    if is_own_choice(chosen) and (notes := NOTES.get()) is not None:
        notes.chosen_id = chosen


def metadata_of(context: Context, key: str) -> str:
    """Return one text of the client's metadata; empty if there is none."""
    sent = dict(context.invocation_metadata() or ()).get(key, "")
    return sent if isinstance(sent, str) else ""


def _traceparent(context: Context) -> str:
    """Return the traceparent of this call's span when there is one, else that of the client."""
    if trace.get_current_span().get_span_context().is_valid:
        return traceparent_of()
    return metadata_of(context, "traceparent")
