"""What an answer with an error is recorded as: a reason of a closed set, and no text that a client sent."""

from __future__ import annotations

import pytest

from common.contracts import errors
from common.contracts.errors import FieldViolation, QuotaViolation
from common.contracts.types import DecisionKind
from router.api.openai.errors import BodyTooLarge, CodingNotServed, UnsupportedField
from router.contracts.refusals import (
    FAULTS,
    Refusal,
    dropped_reason,
    fault_of,
    fault_of_status,
    fault_words,
    refusal_record,
)

SECRET = "xyzzy"
CASES: list[tuple[errors.QuireError, str, tuple[str, ...]]] = [
    (
        errors.InvalidRequest(FieldViolation("sampling.top_p", "is 9"), FieldViolation("stop", f"has {SECRET}")),
        "INVALID_FIELD",
        ("sampling.top_p: is 9", "stop (the answer to the client says what is wrong)"),
    ),
    (
        errors.InvalidRequest(FieldViolation("prompt", "has 9 tokens", errors.CONTEXT_LENGTH_EXCEEDED)),
        "CONTEXT_LENGTH_EXCEEDED",
        ("prompt: has 9 tokens",),
    ),
    (
        errors.InvalidRequest(FieldViolation("a", SECRET, "NEWER_WORD")),
        "INVALID_FIELD",
        ("a (the answer to the client says what is wrong)",),
    ),
    (
        errors.RateLimited(QuotaViolation("tenant a.streams", "1 is open"), 1.0),
        "RATE_LIMITED",
        ("tenant a.streams: 1 is open; try again in 1.0 s",),
    ),
    (
        errors.Overloaded(QuotaViolation("router.queue", "full"), 2.0),
        "OVERLOADED",
        ("router.queue: full; try again in 2.0 s",),
    ),
    (errors.Unavailable("the router is draining"), "UNAVAILABLE", ("the router is draining",)),
    (errors.ModelNotFound(f"model {SECRET!r}", SECRET), "MODEL_NOT_FOUND", (FAULTS["MODEL_NOT_FOUND"],)),
    (errors.NotFound(f"no response {SECRET}"), "NOT_FOUND", (FAULTS["NOT_FOUND"],)),
    (errors.PermissionDenied(f"Host: {SECRET!r}"), "PERMISSION_DENIED", (FAULTS["PERMISSION_DENIED"],)),
    (UnsupportedField("best_of", f"is {SECRET}"), "UNSUPPORTED", (FAULTS["UNSUPPORTED"],)),
    (BodyTooLarge("the body is larger"), "TOO_LARGE", (FAULTS["TOO_LARGE"],)),
    (CodingNotServed(f"is {SECRET}"), "CODING_NOT_SERVED", (FAULTS["CODING_NOT_SERVED"],)),
    (errors.QuireError(SECRET), "INTERNAL", (FAULTS["INTERNAL"],)),
]


@pytest.mark.parametrize(("error", "reason", "words"), CASES, ids=lambda value: str(value)[:24])
def test_an_error_has_a_reason_of_the_closed_set_and_words_without_text_of_the_client(
    error: errors.QuireError, reason: str, words: tuple[str, ...]
) -> None:
    assert (fault_of(error), fault_words(error)) == (reason, words)
    assert SECRET not in " ".join(fault_words(error))


def quota(subject: str) -> QuotaViolation:
    return QuotaViolation(subject, "full")


@pytest.mark.parametrize(
    ("error", "dropped"),
    [
        (errors.Overloaded(quota("router.queue"), 1.0), "rejected-saturated"),
        (errors.Overloaded(quota("router.tokens_in_flight"), 1.0), "rejected-saturated"),
        (errors.Overloaded(quota("router.output"), 1.0), "evicted"),
        (errors.Overloaded(quota("router.answers"), 1.0), "evicted"),
        (errors.RateLimited(quota("tenant a.streams"), 1.0), ""),
        (errors.NoWorker("none for 30 s"), "rejected-no-endpoints"),
        (errors.Draining("it stops"), "rejected-shutting-down"),
        (errors.QueueExpired("too late"), "rejected-ttl-expired"),
        (errors.DeadlineExceeded("cut short"), ""),
        (errors.Unavailable("the store does not answer"), ""),
        (errors.Cancelled("gone"), ""),
        (errors.EngineFailure("a step failed"), ""),
        (errors.InvalidRequest(FieldViolation("stop", SECRET)), ""),
    ],
)
def test_only_a_request_that_the_service_drops_says_so_in_the_words_of_gateways(
    error: errors.QuireError, dropped: str
) -> None:
    assert dropped_reason(error) == dropped


def test_errors_that_say_why_a_request_was_dropped_have_the_reason_of_their_kind() -> None:
    """Clients over gRPC, metrics and records know the kinds alone."""
    for kind in (errors.NoWorker, errors.Draining, errors.QueueExpired):
        (above,) = kind.__bases__
        assert kind.reason == above.reason  # type: ignore[attr-defined]


def test_each_error_that_a_service_raises_has_its_reason_in_the_closed_set() -> None:
    never_answered = {errors.InvalidConfig.reason, errors.PortTaken.reason}
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.QuireError)]
    assert {each.reason for each in kinds} - never_answered <= set(FAULTS)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "MALFORMED"),
        (404, "UNKNOWN_PATH"),
        (405, "METHOD_NOT_ALLOWED"),
        (408, "TIMED_OUT"),
        (418, "INVALID_FIELD"),
        (429, "RATE_LIMITED"),
        (431, "TOO_LARGE"),
        (500, "INTERNAL"),
        (502, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)
def test_a_status_that_no_error_stands_behind_has_a_reason(status: int, reason: str) -> None:
    assert fault_of_status(status) == reason
    assert reason in FAULTS


def test_a_record_says_why_and_which_method_answered_what() -> None:
    refusal = Refusal("openai", "/v1/completions", "404", "MODEL_NOT_FOUND", "quire-1", "of-a-gateway", "acme")
    record = refusal_record(refusal, "r-7", 1_000)
    assert (record.decision_id, record.kind, record.time_ns) == ("r-7", DecisionKind.REJECTION, 1_000)
    assert (record.chosen, record.request_id, record.tenant) == ("MODEL_NOT_FOUND", "quire-1", "acme")
    assert record.reasons == ("the model that it names is not served here", "404 to openai /v1/completions")
