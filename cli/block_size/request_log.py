"""Reads the lengths of requests from a log with one JSON object a line.

A line has `prompt_tokens` and `output_tokens`, and optionally `cached_tokens`, at its top level or under `usage`.
`completion_tokens` is read as `output_tokens`. So the router's log (`--log-format json --log-level debug`) and stored
responses of the API can be read. Lines without token counts are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.contracts.errors import FieldViolation, InvalidRequest

_NAMED = 10  # of malformed lines; a file with more of them is not a request log
_OUTPUT_NAMES = ("output_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """Token counts of one request; `cached` is None where the log does not have it."""

    prompt: int
    output: int
    cached: int | None = None


def read_log(lines: Iterable[str]) -> list[LoggedRequest]:
    """Return the requests of a log. Raises InvalidRequest when it has none, and names each malformed line."""
    found: list[LoggedRequest] = []
    wrong: list[FieldViolation] = []
    for number, line in enumerate(lines, start=1):
        try:
            found += _requests_of(line)
        except ValueError as error:
            wrong.append(FieldViolation(f"line {number}", str(error)))
    if wrong:
        raise InvalidRequest(*wrong[:_NAMED])
    if not found:
        what = "no line has prompt_tokens and output_tokens (the router logs them at --log-level debug)"
        raise InvalidRequest(FieldViolation("log", what))
    return found


def _requests_of(line: str) -> Iterator[LoggedRequest]:
    """Yield the request of a line, if it has one. Raises ValueError for a malformed line."""
    if not line.strip():
        return
    try:
        said = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"is not a JSON object: {line.strip()[:40]}")
    usage = said.get("usage")
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else said
    output = next((name for name in _OUTPUT_NAMES if name in counts), None)
    if "prompt_tokens" in counts and output is not None:
        prompt = _count(counts, "prompt_tokens", 1)
        cached = _count(counts, "cached_tokens", 0) if counts.get("cached_tokens") is not None else None
        if cached is not None and cached >= prompt:
            raise ValueError(f"cached_tokens is {cached}; expected less than the {prompt} tokens of the prompt")
        yield LoggedRequest(prompt, _count(counts, output, 1), cached)


def _count(counts: Mapping[str, Any], name: str, least: int) -> int:
    value = counts[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}")
    return value
