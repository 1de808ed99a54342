"""The lines of a batch's input: each is checked, with its number, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_HTTP_BODY_BYTES
from common.untrusted import json_shape

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
    if excess := json_shape.BODY.excess(line):
        raise BadLine(excess)
    try:
        entry = json.loads(line)
        # What Python reads more than JSON has, NaN and halves of characters, no request can carry.
        json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not valid JSON ({error}); expected one object on one line") from None
    if not isinstance(entry, dict):
        raise BadLine("must be an object with custom_id, method, url and body")
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


class LineCheck:
    """Checks the lines of one batch as they come, and counts those with a request; errors call it by `name`."""

    def __init__(self, name: str = "the input") -> None:
        self._name = name
        self.numbers: dict[str, int] = {}
        """The line of each custom_id, in order."""
        self.urls: set[str] = set()
        self._wrong: list[FieldViolation] = []
        self._read = self._bad = 0

    def take(self, line: bytes) -> None:
        """Look at the next line; an empty one counts for its number alone."""
        self._read += 1
        if not line.strip():
            return
        try:
            item = parsed(line)
            if item.custom_id in self.numbers:
                raise BadLine(f"custom_id {_shown(item.custom_id)} stands in line {self.numbers[item.custom_id]} too")
        except BadLine as bad:
            self._bad += 1
            if self._bad <= _NAMED:
                self._wrong.append(FieldViolation(f"line {self._read}", str(bad)))
        else:
            self.numbers[item.custom_id] = self._read
            self.urls.add(item.url)

    def finish(self) -> None:
        """Raise InvalidRequest that names the bad lines, or says that there are none."""
        if self._bad > _NAMED:
            self._wrong.append(FieldViolation("further lines", f"{self._bad - _NAMED} more are wrong"))
        if self._wrong:
            raise InvalidRequest(*self._wrong)
        if not self.numbers:
            raise InvalidRequest(FieldViolation(self._name, "has no lines; expected one request on each"))


def checked_ids(lines: Iterable[bytes]) -> list[str]:
    """Return the custom_ids of a batch, in order. Raises InvalidRequest that names the bad lines."""
    check = LineCheck()
    for line in lines:
        check.take(line)
    check.finish()
    return list(check.numbers)


def items(lines: Iterable[bytes]) -> Iterator[Item]:
    """Yield the requests of lines that were checked before."""
    for line in lines:
        if line.strip():
            yield parsed(line)
