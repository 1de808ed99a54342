"""Why a request was not taken, in words: a wrong one, one that has to wait, and one that fits no worker."""

from __future__ import annotations

from dataclasses import replace

from common.errors import CONTEXT_LENGTH_EXCEEDED, FieldViolation, InvalidRequest
from common.types import Candidate, Decision, DecisionKind
from router.core.placement import TOO_LARGE, PlacementRequest

# What the record of a wrong request says that it was refused by.
CONTEXT_LENGTH = "context length"
WRONG_FIELDS = "wrong fields"
# The words about these fields have numbers alone, and no text of the client.
_NUMBERS_ALONE = "sampling."
_MOST_WORDS = 8
# Workers that the record of a wait names at most.
_NAMED = 8


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
