"""Reads multipart/form-data (RFC 7578) as it comes, without keeping any of it.

    --BOUNDARY CRLF  headers CRLF CRLF  content CRLF  --BOUNDARY CRLF ...  --BOUNDARY--

A part's content is handed on in pieces, so that a file of any size takes the memory of one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from common.contracts.errors import FieldViolation, InvalidRequest

# Bytes of the headers of one part, and parts of one body.
_MOST_HEAD: Final = 8 << 10
_MOST_PARTS: Final = 32
# Characters of a boundary, as RFC 2046 has it.
_MOST_BOUNDARY: Final = 70
_PARAMETER: Final = re.compile(r';\s*([\w*-]+)\s*=\s*("(?:\\.|[^"\\])*"|[^;"\s]+)')


@dataclass(frozen=True, slots=True)
class PartBegun:
    """The beginning of a part; `filename` is None where the part is a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """A piece of the content of the part that began last."""

    data: bytes


Event: TypeAlias = PartBegun | PartData


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a content-type names. Raises InvalidRequest."""
    kind, _, _ = content_type.partition(";")
    found = _parameters(content_type).get("boundary", "")
    if kind.strip().lower() != "multipart/form-data" or not 0 < len(found) <= _MOST_BOUNDARY or not found.isascii():
        what = f"is {content_type[:100] or 'missing'!r}; expected multipart/form-data with a boundary"
        raise InvalidRequest(FieldViolation("content-type", what))
    return found.encode()


class MultipartReader:
    """Takes a body in pieces of any size. Raises InvalidRequest for what is not multipart/form-data."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first boundary has no line before it.
        self._rest = b"\r\n"
        self._step: Callable[[], bool] = self._content
        self._events: list[Event] = []
        self._parts = 0
        self._ended = False

    def feed(self, data: bytes) -> list[Event]:
        """Return what a piece completes."""
        self._rest += data
        self._events = []
        while self._step():
            pass
        return self._events

    def finish(self) -> None:
        """Raise InvalidRequest where the body ends before its last boundary."""
        if not self._ended:
            raise _malformed("ends before its last boundary")

    # Each step returns whether it went on; if not, it needs more bytes.

    def _content(self) -> bool:
        place = self._rest.find(self._delimiter)
        if place >= 0:
            data, self._rest = self._rest[:place], self._rest[place + len(self._delimiter) :]
            self._step = self._after_boundary
        else:
            # What may be the beginning of a boundary stays.
            keep = len(self._delimiter) - 1
            if len(self._rest) <= keep:
                return False
            data, self._rest = self._rest[:-keep], self._rest[-keep:]
        if data and self._parts:
            self._events.append(PartData(data))
        return True

    def _after_boundary(self) -> bool:
        if self._rest.startswith(b"--"):
            self._ended, self._rest = True, b""
            self._step = self._epilogue
            return True
        line, end, rest = self._rest.partition(b"\r\n")
        if not end:
            if len(self._rest) > _MOST_HEAD:
                raise _malformed("has a boundary without an end of its line")
            return False
        if line.strip(b" \t"):
            raise _malformed("has a boundary with something behind it")
        self._rest, self._step = rest, self._head
        return True

    def _head(self) -> bool:
        head, end, rest = self._rest.partition(b"\r\n\r\n")
        if self._rest.startswith(b"\r\n"):
            head, end = b"", b"\r\n"
        if len(head) > _MOST_HEAD:
            raise _malformed(f"has a part with headers of more than {_MOST_HEAD} bytes")
        if not end:
            return False
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _malformed(f"has more than {_MOST_PARTS} parts")
        self._rest, self._step = rest, self._content
        self._events.append(_part_of(head))
        return True

    def _epilogue(self) -> bool:
        self._rest = b""
        return False


def _part_of(head: bytes) -> PartBegun:
    """Return the beginning of a part from its headers."""
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError:
        raise _malformed("has a part with headers that are not in UTF-8") from None
    for line in lines:
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            found = _parameters(value)
            if value.partition(";")[0].strip().lower() == "form-data" and "name" in found:
                return PartBegun(found["name"], found.get("filename"))
    raise _malformed("has a part without  content-disposition: form-data; name=...")


def _parameters(value: str) -> dict[str, str]:
    """Return the parameters of a header, the first of each name, without their quotes."""
    found = dict[str, str]()
    for name, given in _PARAMETER.findall(value):
        text = re.sub(r"\\([\\\"])", r"\1", given[1:-1]) if given.startswith('"') else given
        found.setdefault(name.lower(), text)
    return found


def _malformed(what: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("body", f"{what}; expected multipart/form-data"))
