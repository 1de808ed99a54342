"""The lines of a batch's input: each is checked, with its number, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from common.errors import FieldViolation, InvalidRequest
from common.limits import MAX_HTTP_BODY_BYTES

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_CUSTOM_ID: Final = 512
# Bad lines that an error names.
_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(ValueError):
    """What is wrong with a line, what was expected."""


def parsed(line: bytes) -> Item:
    """Return the request in a line. Raises BadLine."""
    if len(line) > MAX_HTTP_BODY_BYTES:
        raise BadLine(f"has {len(line)} bytes; the server takes at most {MAX_HTTP_BODY_BYTES}")
    try:
        entry = json.loads(line)
        # What Python reads more than JSON has, NaN and halves of characters, no request can carry.
        json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is no JSON ({error}); expected one object on one line") from None
    if not isinstance(entry, dict):
        raise BadLine("is no object; expected custom_id, method, url and body")
    _check(entry)
    return Item(entry["custom_id"], entry["url"], entry["body"])


def _check(entry: dict[str, Any]) -> None:
    custom_id, body = entry.get("custom_id"), entry.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise BadLine(f"custom_id is {_shown(custom_id)}; expected a text of 1 to {MAX_CUSTOM_ID} characters")
    if entry.get("method", "POST") != "POST":
        raise BadLine(f"method is {_shown(entry['method'])}; expected POST")
    if entry.get("url") not in URLS:
        raise BadLine(f"url is {_shown(entry.get('url'))}; expected one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise BadLine(f"body is {_shown(body)}; expected an object")
    for field in ("stream", "background"):
        if body.get(field):
            raise BadLine(f"body.{field} is {_shown(body[field])}; an answer of a batch comes as a whole: leave it out")


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def checked_ids(lines: Iterable[bytes]) -> list[str]:
    """Return the custom_ids of a batch, in order. Raises InvalidRequest that names the bad lines."""
    numbers: dict[str, int] = {}
    wrong: list[FieldViolation] = []
    count = 0
    for number, line in _numbered(lines):
        try:
            item = parsed(line)
            if item.custom_id in numbers:
                raise BadLine(f"custom_id {_shown(item.custom_id)} stands in line {numbers[item.custom_id]} too")
            numbers[item.custom_id] = number
        except BadLine as bad:
            count += 1
            if count <= _NAMED:
                wrong.append(FieldViolation(f"line {number}", str(bad)))
    if count > _NAMED:
        wrong.append(FieldViolation("further lines", f"{count - _NAMED} more are wrong"))
    if wrong:
        raise InvalidRequest(*wrong)
    if not numbers:
        raise InvalidRequest(FieldViolation("the input", "has no lines; expected one request on each"))
    return list(numbers)


def items(lines: Iterable[bytes]) -> Iterator[Item]:
    """Yield the requests of lines that were checked before."""
    for _, line in _numbered(lines):
        yield parsed(line)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers, but for empty ones."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line
