"""Why a request ended early: refused, out of time, given up by its client, or failed."""

from __future__ import annotations

from typing import Final

from router.contracts.refusals import CONTEXT_LENGTH, FAULTS, WRONG_FIELDS
from router.observe.diagnosis.causes import Cause, advice_for
from router.observe.diagnosis.outcome import Outcome
from router.observe.diagnosis.request_history import REFUSED_BY_MANAGER, RequestHistory
from router.observe.diagnosis.verdict import Verdict
from router.placement.admission import ANY_WORKER, PREDICTED

# The failures of a client that does not read, and of one that left.
READS_TOO_SLOWLY: Final = "the client reads too slowly"
CLIENT_LEFT: Final = "the client went away"

END_WORDS: Final = {
    Cause.REFUSED: "Refused",
    Cause.RATE_LIMITED: "Refused",
    Cause.TOO_LARGE: "Refused",
    Cause.WRONG_REQUEST: "Refused",
    Cause.HOPELESS_DEADLINE: "Refused, because its deadline was hopeless,",
    Cause.DEADLINE: "Its deadline passed",
    Cause.CLIENT_GONE: "Its client went away",
    Cause.ABORTED: "Aborted by another call",
    Cause.NO_WORKER: "It failed for want of a worker",
    Cause.SLOW_CLIENT: "Ended because the client did not read",
    Cause.FAILED: "It failed",
}
# By the reason of the error (`QuireError.reason`), or the finish reason of a sequence.
_BY_REASON: Final = {
    "DEADLINE_EXCEEDED": Cause.DEADLINE,
    "deadline": Cause.DEADLINE,
    "UNAVAILABLE": Cause.NO_WORKER,
    "RATE_LIMITED": Cause.RATE_LIMITED,
}
# How the name of a limit of a tenant begins; any other one is of the router.
_OF_TENANT: Final = "tenant "

# INVALID_ARGUMENT stands in logs on disk that an earlier version wrote.
_WRONG_ENDS: Final = ("INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED", "INVALID_ARGUMENT")
# Fields of a request that fits no worker; a worker names others where it can do nothing with what they hold.
_LENGTHS: Final = ("prompt", "sampling.max_tokens")
# By what refused a request when it came; anything else is a limit.
_WRONG: Final = {
    CONTEXT_LENGTH: (Cause.TOO_LARGE, "it does not fit the context of the model"),
    WRONG_FIELDS: (Cause.WRONG_REQUEST, "fields of it are wrong"),
}
# By the reason with which an API refused it; any other one is a mistake of the client.
_BY_FAULT: Final = {
    "CONTEXT_LENGTH_EXCEEDED": Cause.TOO_LARGE,
    "RATE_LIMITED": Cause.RATE_LIMITED,
    "OVERLOADED": Cause.REFUSED,
    "UNAVAILABLE": Cause.NO_WORKER,
    "DEADLINE_EXCEEDED": Cause.DEADLINE,
    "CANCELLED": Cause.CLIENT_GONE,
    "IDENTITY_MISMATCH": Cause.FAILED,
    "STALE_EPOCH": Cause.FAILED,
    "PROTOCOL_VIOLATION": Cause.FAILED,
    "ENGINE_FAILURE": Cause.FAILED,
    "INTERNAL": Cause.FAILED,
}


def end_words(cause: Cause, outcome: Outcome) -> str:
    """Return how the sentence about the end begins."""
    if cause is Cause.HOPELESS_DEADLINE and ANY_WORKER in outcome.failure:
        return "It waited for a worker until its deadline was hopeless,"
    return END_WORDS[cause]


def end_cause(outcome: Outcome) -> Cause | None:
    """Return why a request ended early; None if it ended by itself."""
    if not outcome.failure:
        return None
    if outcome.ended == "DEADLINE_EXCEEDED" and PREDICTED in outcome.failure:
        return Cause.HOPELESS_DEADLINE
    if outcome.ended == "OVERLOADED":
        return Cause.SLOW_CLIENT if READS_TOO_SLOWLY in outcome.failure else Cause.REFUSED
    if outcome.ended == "CANCELLED":
        return Cause.CLIENT_GONE if CLIENT_LEFT in outcome.failure else Cause.ABORTED
    if outcome.ended in _WRONG_ENDS:
        return Cause.TOO_LARGE if outcome.failure.startswith(_LENGTHS) else Cause.WRONG_REQUEST
    return _BY_REASON.get(outcome.ended, Cause.FAILED)


def refusal_verdict(history: RequestHistory) -> Verdict | None:
    """Return why the router refused a request when it came; None if it did not."""
    refused = [each for each in history.refusals if each.subject != REFUSED_BY_MANAGER]
    if not refused:
        return None
    words = refused[-1].words or "the limit is reached"
    if refused[-1].subject in _WRONG:
        cause, what = _WRONG[refused[-1].subject]
        return Verdict(cause, 0.0, f"Refused at once, because {what}: {words}.", (), advice_for(cause))
    if refused[-1].subject in FAULTS:
        cause = _BY_FAULT.get(refused[-1].subject, Cause.WRONG_REQUEST)
        return Verdict(cause, 0.0, f"Refused at once with {refused[-1].subject}: {words}.", (), advice_for(cause))
    limited = refused[-1].subject.startswith(_OF_TENANT)
    cause, what = (Cause.RATE_LIMITED, " with RATE_LIMITED") if limited else (Cause.REFUSED, "")
    sentence = f"Refused at once{what} by the limit {refused[-1].subject}: {words}."
    return Verdict(cause, 0.0, sentence, (), advice_for(cause))
