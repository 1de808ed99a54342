"""The one mapping from Quire's errors to HTTP: status, headers, and the body that OpenAI-compatible clients read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from common.contracts import errors
from common.rpc.status import no_memory
from common.settings.config import mistake
from router.contracts.refusals import DROPPED_REASON_HEADER, dropped_reason, fault_of, fault_of_status, fault_words

Json = dict[str, Any]
# The reason of an answer with an error, one of FAULTS, and words of it for operators.
Fault = tuple[str, tuple[str, ...]]
FAULT = "fault"
"""Where the state of a request has its Fault."""
# Makes status and body of another API from those of this one, and from the error, if they were made of one.
ErrorForm = Callable[[int, Json, errors.QuireError | None], tuple[int, Json]]


class BodyTooLarge(errors.QuireError):
    """A body with more bytes than are read."""

    reason = "TOO_LARGE"


class CodingNotServed(errors.QuireError):
    """A body in a content-encoding that is not read."""

    reason = "CODING_NOT_SERVED"


_STATUS: Mapping[type[errors.QuireError], int] = {
    BodyTooLarge: 413,
    CodingNotServed: 415,
    errors.InvalidRequest: 400,
    # Not 501: clients of this API try again after any 5xx.
    errors.Unsupported: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.AlreadyExists: 409,
    errors.Overloaded: 429,
    errors.Cancelled: 499,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.QuireError: 500,
}
# Codes that OpenAI's clients expect, and those that this API has always had; any other one is Quire's reason.
_CODES: Mapping[str, str] = {
    errors.Overloaded.reason: "rate_limit_exceeded",
    errors.RateLimited.reason: "rate_limit_exceeded",
    errors.InvalidRequest.reason: "invalid_argument",
    errors.MALFORMED: "invalid_argument",
    BodyTooLarge.reason: "body_too_large",
    errors.Unauthenticated.reason: "invalid_api_key",
}
# Field paths of the gRPC API as this API has them.
_PATHS = (
    ("sampling.include_stop", "include_stop_str_in_output"),
    ("sampling.", ""),
    ("prompt.chat.tools_json", "tools"),
    ("prompt.chat.documents_json", "documents"),
    ("prompt.chat.template_kwargs_json", "chat_template_kwargs"),
    ("prompt.chat.", ""),
    ("prompt.token_ids.ids", "prompt"),
    ("prompt.text", "prompt"),
    ("cache.salt", "cache_salt"),
    ("cache.", ""),
    ("token_ids", "tokens"),
)
# Characters of a message: a body can be wrong in very many places.
_MAX_MESSAGE = 4_000
_WORD = re.compile(r"\w+")


class UnsupportedField(errors.Unsupported):
    """A field that is not offered, as the body names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def body_of(error: errors.QuireError) -> Json:
    """Return the error body: message, type, the first wrong field, and OpenAI's code or Quire's reason."""
    message, param, reason = str(error), None, error.reason
    if isinstance(error, errors.InvalidRequest):
        message, param = "; ".join(map(_said, error.violations)), _path(error.violations[0].field)
    elif isinstance(error, UnsupportedField):
        param = error.field
    return _body(status_of(error), message, param, _CODES.get(reason, reason.lower()))


def _said(violation: errors.FieldViolation) -> str:
    # Clients recognise what exceeds the context by how the message begins.
    named = "" if violation.reason == errors.CONTEXT_LENGTH_EXCEEDED else f"{_path(violation.field)}: "
    return named + violation.description


def status_of(error: errors.QuireError) -> int:
    """Return the HTTP status: that of the nearest class above the error in the tree."""
    return next(_STATUS[each] for each in type(error).__mro__ if each in _STATUS)


def headers_of(error: errors.QuireError) -> dict[str, str]:
    """Return the headers that say when a client may retry, or that it may not, and why a request was dropped."""
    headers = {DROPPED_REASON_HEADER: dropped} if (dropped := dropped_reason(error)) else {}
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        seconds = error.retry_after_s
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))} | headers
    challenge = {"www-authenticate": "Bearer"} if isinstance(error, errors.Unauthenticated) else {}
    return {"x-should-retry": "false"} | challenge | headers


def install(app: FastAPI) -> None:
    """Let an application answer every error with such a body."""
    app.add_exception_handler(errors.QuireError, _quire_error)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(UnicodeEncodeError, _no_text)
    app.add_exception_handler(MemoryError, _no_memory)
    app.add_exception_handler(Exception, _bug)


def _body(status: int, message: str, param: str | None, code: str | None) -> Json:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": code}}


def speak(app: FastAPI, path: str, form: ErrorForm, api: str) -> None:
    """Let an application answer errors of the paths that begin so in another form, that of `api`."""
    app.state.error_forms = {**_forms(app), path: (api, form)}


def api_of(scope: Scope) -> str:
    """Return the API that a path belongs to."""
    spoken = _forms(scope.get("app")).items()
    return next((api for path, (api, _) in spoken if scope["path"].startswith(path)), "openai")


def response_to(error: errors.QuireError, scope: Scope) -> JSONResponse:
    """Return the whole answer of a request that ended with an error."""
    return _answer(scope, body_of(error), status_of(error), headers_of(error), error)


def _answer(
    scope: Scope,
    body: Json,
    status: int,
    headers: Mapping[str, str],
    error: errors.QuireError | None = None,
    fault: Fault | None = None,
) -> JSONResponse:
    """Return an answer in the form of its path, and note what it is for."""
    if error is not None:
        fault = fault_of(error), fault_words(error)
    scope.setdefault("state", {})[FAULT] = fault or (fault_of_status(status), ())
    for path, (_, form) in _forms(scope.get("app")).items():
        if scope["path"].startswith(path):
            status, body = form(status, body, error)
    return JSONResponse(body, status, headers)


def _forms(app: FastAPI | None) -> Mapping[str, tuple[str, ErrorForm]]:
    return {} if app is None else getattr(app.state, "error_forms", {})


async def _quire_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.QuireError)
    return response_to(error, request.scope)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    """Answer a body that is not JSON, or whose fields have the wrong types; every such field is named."""
    assert isinstance(error, RequestValidationError)
    found: dict[str | None, str] = {}
    for each in error.errors():
        # A union reports each of its members: the first is enough.
        found.setdefault(_place(each["loc"]), _mistake(request, each))
    message = "; ".join(f"{path}: {what}" if path else what for path, what in found.items())
    body = _body(400, message, next(iter(found)), _CODES[errors.InvalidRequest.reason])
    # Of a path the first part alone is a name of this API; a client may have chosen what is within it.
    fields = tuple([path.partition(".")[0].partition("[")[0] for path in found if path])
    named = tuple([f"{field}: has a wrong type or form" for field in dict.fromkeys(fields)])
    fault = errors.InvalidRequest.reason if named else errors.MALFORMED, named
    return _answer(request.scope, body, 400, {"x-should-retry": "false"}, fault=fault)


async def _no_text(request: Request, error: Exception) -> JSONResponse:
    """Answer a body with halves of characters: JSON can write them, but messages to the worker cannot hold them."""
    message = "a text has half of a surrogate pair, which is not a character; send whole pairs"
    body = _body(400, message, None, _CODES[errors.InvalidRequest.reason])
    return _answer(request.scope, body, 400, {"x-should-retry": "false"}, fault=(errors.MALFORMED, ()))


async def _no_memory(request: Request, error: Exception) -> JSONResponse:
    """Answer a request for which no memory is left; the others go on."""
    return response_to(no_memory(), request.scope)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer what the server itself refuses: unknown paths, and methods that a path does not have."""
    assert isinstance(error, HTTPException)
    headers = {"x-should-retry": "false", **(error.headers or {})}
    known = {
        404: (
            "no such path; /v1/chat/completions is one, and /openapi.json lists all",
            "unknown_url",
        ),
        405: (f"{request.method} is not offered here; use {headers.get('Allow', 'another')}", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), None))
    return _answer(request.scope, _body(error.status_code, message, None, code), error.status_code, headers)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    # The text of an unexpected error may hold a prompt: the server logs it, and the client does not get it. This answer
    # passes no middleware any more.
    headers = {"x-should-retry": "false", **request.state.ids.headers()}
    return _answer(request.scope, body_of(errors.QuireError("internal error")), 500, headers)


def _place(location: Sequence[str | int]) -> str | None:
    """Return the path of a field, such as messages[0].role, without the members of a union that pydantic appends."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        elif _WORD.fullmatch(part) and part not in ("str", "int", "bool", "dict"):
            path += f".{part}" if path else part
        else:
            break
    return path or None


def _mistake(request: Request, found: Mapping[str, Any]) -> str:
    if found["type"] == "json_invalid":
        return f"the body is not valid JSON: {found['ctx']['error']} at character {found['loc'][-1]}"
    if len(found["loc"]) > 1:
        return mistake(found)
    given = request.headers.get("content-type", "none")
    if not given.partition(";")[0].strip().lower().endswith("json"):
        return f"the content-type is {given}; expected application/json"
    return 'the body must be a JSON object, such as {"model": ...}'


def _path(field: str) -> str:
    for ours, theirs in _PATHS:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field
