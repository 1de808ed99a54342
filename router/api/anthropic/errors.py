"""Errors in the form of Anthropic's API, for the paths of this face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.contracts.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, Overloaded, QuireError, RateLimited
from router.api.openai.errors import body_of, status_of

Json = dict[str, Any]
# Not 503: clients of this API know a server that is busy or not ready by this status.
OVERLOADED: Final = 529
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def in_this_form(status: int, body: Json, error: QuireError | None) -> tuple[int, Json]:
    """Return status and body for those of the OpenAI-compatible API; `error` is what they were made of, if anything."""
    if status == 503 or (isinstance(error, Overloaded) and not isinstance(error, RateLimited)):
        status = OVERLOADED
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": _message(body, error)}}


def error_body(error: QuireError) -> Json:
    return in_this_form(status_of(error), body_of(error), error)[1]


def _message(body: Json, error: QuireError | None) -> str:
    """Return the message; that of a prompt which the context cannot hold begins as clients know it."""
    message = str(body["error"]["message"])
    violations = error.violations if isinstance(error, InvalidRequest) else ()
    too_long = any(each.reason == CONTEXT_LENGTH_EXCEEDED for each in violations)
    return f"prompt is too long: {message}" if too_long else message
