"""Why a request was not taken, in words: a wrong one, one that has to wait, and one that fits no worker.

Every answer with an error is a `Refusal`. Its reason is one of FAULTS, a closed set: it is a label of a metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    DeadlineExceeded,
    Draining,
    FieldViolation,
    InvalidRequest,
    NoWorker,
    Overloaded,
    QueueExpired,
    QuireError,
    RateLimited,
    Unavailable,
)
from common.contracts.types import Candidate, Decision, DecisionKind
from router.placement.placement_request import TOO_LARGE, PlacementRequest


# Words for requests that the context cannot hold: clients recognise them, and shorten the conversation.
def beyond_context(field: str, context: int, what: str) -> FieldViolation:
    """Return the violation of a field; `what` follows the context's length, and says what to do."""
    words = f"This model's maximum context length is {context} tokens. However, {what}"
    return FieldViolation(field, words, CONTEXT_LENGTH_EXCEEDED)


# What the record of a wrong request says that it was refused by.
CONTEXT_LENGTH = "context length"
WRONG_FIELDS = "wrong fields"
# What a request was refused for, in words that hold for each such request.
FAULTS: Final[Mapping[str, str]] = {
    "INVALID_FIELD": "fields of it are wrong",
    "CONTEXT_LENGTH_EXCEEDED": "it does not fit the context of the model",
    "MALFORMED": "it cannot be read as a message of this API",
    "TOO_LARGE": "it has more bytes than are read",
    "NOT_RECEIVED": "its message did not come whole: it exceeds the limit of gRPC, or its client left",
    "CODING_NOT_SERVED": "its content-encoding is none of those that are read",
    "UNSUPPORTED": "it asks for what is not offered here",
    "UNAUTHENTICATED": "it showed no key or token that is known here",
    "PERMISSION_DENIED": "its caller may not do this",
    "NOT_FOUND": "what it names is not known here",
    "MODEL_NOT_FOUND": "the model that it names is not served here",
    "UNKNOWN_PATH": "there is no such path or method here",
    "METHOD_NOT_ALLOWED": "its path has no such method",
    "ALREADY_EXISTS": "the request id that it names is in use",
    "RATE_LIMITED": "its tenant is over a limit of its own",
    "OVERLOADED": "the service has no room for it",
    "UNAVAILABLE": "the service cannot serve it now",
    "TIMED_OUT": "it did not come whole in time",
    "DEADLINE_EXCEEDED": "its deadline passed, or cannot be met",
    "CANCELLED": "its client went away, or asked for its end",
    "IDENTITY_MISMATCH": "two services do not work together",
    "STALE_EPOCH": "a KV manager that was replaced has answered",
    "PROTOCOL_VIOLATION": "two services broke their protocol",
    "ENGINE_FAILURE": "a step failed at a worker",
    "INTERNAL": "an unexpected error; the log of the router has it",
}
# Of what an HTTP server refuses by itself: unknown paths, connections beyond their number, requests that come slowly.
_FAULT_OF_STATUS: Final[Mapping[int, str]] = {
    400: "MALFORMED",
    404: "UNKNOWN_PATH",
    405: "METHOD_NOT_ALLOWED",
    408: "TIMED_OUT",
    429: "RATE_LIMITED",
    431: "TOO_LARGE",
    503: "UNAVAILABLE",
}
DROPPED_REASON_HEADER: Final = "x-llm-d-request-dropped-reason"
"""What llm-d calls the header of an answer which says why a request was dropped. Gateways and queues read it."""
SATURATED: Final = "rejected-saturated"
"""Why no request was begun: there is no room."""
# The words of llm-d for the others. `rejected` was not begun; `evicted` was, and was ended to make room.
_DROPPED: Final[Mapping[type[QuireError], str]] = {
    # More workers would not help a tenant that is over a limit of its own.
    RateLimited: "",
    Overloaded: SATURATED,
    NoWorker: "rejected-no-endpoints",
    Draining: "rejected-shutting-down",
    QueueExpired: "rejected-ttl-expired",
    QuireError: "",
}
_EVICTED: Final = "evicted"
# Bounds that a request meets after it has begun: output that waits for its client, and answers that grow.
_LATE_BOUNDS: Final = ("router.output", "router.answers")
# Errors whose words are the service's own: they quote nothing that a client sent.
_OWN_WORDS: Final = (Overloaded, Unavailable, DeadlineExceeded)
# The words about these fields have numbers alone, and no text of the client.
_NUMBERS_ALONE = "sampling."
_MOST_WORDS = 8
# Workers that the record of a wait names at most.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Refusal:
    """One answer with an error. It may be recorded and logged, so it has no text that the client sent, but for ids.

    `method` is a path as the server declares it, or the full name of an RPC; `code` an HTTP status, or the name of a
    status of gRPC. `client_id` is the client's own name for the request.
    """

    api: str
    method: str
    code: str
    reason: str
    request_id: str = ""
    client_id: str = ""
    owner: str = ""
    words: tuple[str, ...] = ()


def fault_of(error: QuireError) -> str:
    """Return the reason of an error, or of the nearest class above it, that is one of FAULTS."""
    above = [each.reason for each in type(error).__mro__ if issubclass(each, QuireError)]
    return next(reason for reason in (error.reason, *above) if reason in FAULTS)


def dropped_reason(error: QuireError) -> str:
    """Return why a request was dropped, in llm-d's words; "" where the service did not drop it."""
    found = next(_DROPPED[each] for each in type(error).__mro__ if each in _DROPPED)
    late = isinstance(error, Overloaded) and error.violation.subject in _LATE_BOUNDS
    return _EVICTED if found and late else found


def fault_of_status(status: int) -> str:
    """Return the reason of an HTTP answer that no error of Quire stands behind."""
    return _FAULT_OF_STATUS.get(status, "INTERNAL" if status >= 500 else "INVALID_FIELD")


def fault_words(error: QuireError) -> tuple[str, ...]:
    """Return what an operator should know of an error, without text that a client sent."""
    if isinstance(error, InvalidRequest):
        return tuple(map(_wrong_words, error.violations[:_MOST_WORDS]))
    return (str(error),) if isinstance(error, _OWN_WORDS) else (FAULTS[fault_of(error)],)


def refusal_record(refusal: Refusal, decision_id: str, time_ns: int) -> Decision:
    words = refusal.words or (FAULTS[refusal.reason],)
    return Decision(
        decision_id=decision_id,
        kind=DecisionKind.REJECTION,
        time_ns=time_ns,
        chosen=refusal.reason,
        request_id=refusal.request_id,
        reasons=(*words, f"{refusal.code} to {refusal.api} {refusal.method}"),
        tenant=refusal.owner,
    )


def reasons_against(decision: Decision) -> str:
    """Return why each worker was out."""
    return "; ".join(f"{each.name}: {each.rejected}" for each in decision.candidates if each.rejected)


def too_large(decision: Decision) -> InvalidRequest:
    what = f"prompt and output fit no worker: {reasons_against(decision)}"
    return InvalidRequest(FieldViolation("sampling.max_tokens", what))


def wrong_request_record(
    decision_id: str, time_ns: int, request_id: str, owner: str, error: InvalidRequest
) -> Decision:
    """Return the record of a request that was refused because fields of it are wrong.

    A record may be written to a disk, so it has no text that the client sent: words that may quote it are left out.
    """
    too_long = [each for each in error.violations if each.reason == CONTEXT_LENGTH_EXCEEDED]
    return Decision(
        decision_id=decision_id,
        kind=DecisionKind.REJECTION,
        time_ns=time_ns,
        chosen=CONTEXT_LENGTH if too_long else WRONG_FIELDS,
        request_id=request_id,
        reasons=tuple([_wrong_words(each) for each in (too_long or error.violations)[:_MOST_WORDS]]),
        tenant=owner,
    )


def _wrong_words(violation: FieldViolation) -> str:
    if violation.reason == CONTEXT_LENGTH_EXCEEDED or violation.field.startswith(_NUMBERS_ALONE):
        return f"{violation.field}: {violation.description}"
    return f"{violation.field} (the answer to the client says what is wrong)"


def waiting_record(
    blocked: Decision, request: PlacementRequest, owner: str, arrival: int, ahead: int, time_ns: int
) -> Decision:
    """Return the record of a request that waits behind so many, because no worker took the head of the queue.

    `blocked` is the decision on that head. `arrival` is the number of the request among those of this router.
    """
    own = blocked.request_id == request.request_id
    return replace(
        blocked,
        decision_id=f"{blocked.decision_id}-{arrival}",
        kind=DecisionKind.QUEUED,
        time_ns=time_ns,
        request_id=request.request_id,
        candidates=tuple([_refusal(each, own) for each in blocked.candidates[:_NAMED]]),
        signal_ages=(),
        figures=(("ahead", float(ahead)),),
        traceparent=request.traceparent,
        tenant=owner,
    )


def _refusal(candidate: Candidate, own: bool) -> Candidate:
    """Return why a worker took no request, without the hits and the length of a request that is not one's own."""
    reason = candidate.rejected
    return Candidate(candidate.name, rejected=reason if own or not reason.startswith(TOO_LARGE) else TOO_LARGE)
