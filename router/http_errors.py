"""The one mapping from Quire's errors to HTTP: status, headers, and the body that OpenAI-compatible clients read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from common import errors

_STATUS: Mapping[type[errors.QuireError], int] = {
    errors.InvalidRequest: 400,
    # Not 501: clients of this API try again after any 5xx.
    errors.Unsupported: 400,
    errors.NotFound: 404,
    errors.AlreadyExists: 409,
    errors.Overloaded: 429,
    errors.Cancelled: 499,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.QuireError: 500,
}
# Field paths of the gRPC API as this API has them.
_PATHS = (
    ("sampling.include_stop", "include_stop_str_in_output"),
    ("sampling.", ""),
    ("prompt.chat.", ""),
    ("prompt.token_ids.ids", "prompt"),
    ("prompt.text", "prompt"),
    ("cache.salt", "cache_salt"),
)


def body_of(error: errors.QuireError) -> dict[str, Any]:
    """Return the error body: message, type, the first wrong field, and Quire's reason as the code."""
    message, param = str(error), None
    if isinstance(error, errors.InvalidRequest):
        named = [(_path(violation.field), violation.description) for violation in error.violations]
        message, param = "; ".join(f"{field}: {what}" for field, what in named), named[0][0]
    kind = "invalid_request_error" if status_of(error) < 429 else "server_error"
    kind = "rate_limit_error" if isinstance(error, errors.Overloaded) else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}


def status_of(error: errors.QuireError) -> int:
    """Return the HTTP status: that of the nearest class above the error in the tree."""
    return next(_STATUS[each] for each in type(error).__mro__ if each in _STATUS)


def headers_of(error: errors.QuireError) -> dict[str, str]:
    """Return when to try again, or that this would not help."""
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        seconds = error.retry_after_s
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
    return {"x-should-retry": "false"}


def install(app: FastAPI) -> None:
    """Answer every error of an application with such a body."""
    app.add_exception_handler(errors.QuireError, _quire_error)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


def _answer(error: errors.QuireError, status: int | None = None) -> JSONResponse:
    return JSONResponse(body_of(error), status or status_of(error), headers_of(error))


async def _quire_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.QuireError)
    return _answer(error)


async def _malformed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found: dict[str, errors.FieldViolation] = {}
    for each in error.errors():
        # A union reports each of its members: the first is enough.
        path = ".".join(str(part) for part in each["loc"][1:2]) or "body"
        found.setdefault(path, errors.FieldViolation(path, each["msg"]))
    return _answer(errors.InvalidRequest(*found.values()))


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    known = {404: errors.NotFound("no such path; /v1/models, /v1/completions and /v1/chat/completions are here")}
    return _answer(known.get(error.status_code, errors.QuireError(error.detail)), error.status_code)


async def _bug(_: Request, error: Exception) -> JSONResponse:
    # The text of a bug may hold a prompt; the server logs it, the client learns nothing of it.
    return _answer(errors.QuireError("internal error"))


def _path(field: str) -> str:
    for ours, theirs in _PATHS:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field
