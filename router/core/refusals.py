"""Why workers took no request, in words: the record of a wait, and the error of a request that fits no worker."""

from __future__ import annotations

from dataclasses import replace

from common.errors import FieldViolation, InvalidRequest
from common.types import Candidate, Decision, DecisionKind
from router.core.placement import TOO_LARGE, PlacementRequest

# Workers that the record of a wait names at most.
_NAMED = 8


def reasons_against(decision: Decision) -> str:
    """Return why each worker was out."""
    return "; ".join(f"{each.name}: {each.rejected}" for each in decision.candidates if each.rejected)


def too_large(decision: Decision) -> InvalidRequest:
    what = f"prompt and output fit no worker: {reasons_against(decision)}"
    return InvalidRequest(FieldViolation("sampling.max_tokens", what))


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
