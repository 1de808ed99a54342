"""The form of an upload, which is read while it comes: its fields, and its file, whose lines are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.batch.lines import LineCheck
from common.contracts import limits
from common.contracts.errors import FieldViolation, InvalidRequest
from router.api.openai.batches.multipart import MultipartReader, PartBegun
from router.api.openai.errors import BodyTooLarge

PURPOSE: Final = "batch"
_FILE: Final = "file"
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FIELDS: Final = ("purpose", _ANCHOR, _SECONDS)
_MOST_FIELD: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Upload:
    """What a whole form says of its file."""

    filename: str
    size: int
    seconds: int
    lines: int
    urls: tuple[str, ...]


class UploadForm:
    """Reads one form. `room` bounds the bytes of its file, beside the bound for any file.

    Raises InvalidRequest and BodyTooLarge.
    """

    def __init__(self, boundary: bytes, room: int) -> None:
        self._reader, self._most = MultipartReader(boundary), min(room, limits.MAX_BATCH_FILE_BYTES)
        self._fields: dict[str, bytes] = {}
        self._name: str | None = None
        self._filename: str | None = None
        self._lines, self._size = LineCheck(_FILE), 0
        # The pieces of the line that is not whole, and their bytes.
        self._begun: list[bytes] = []
        self._begun_size = 0

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the form; return what it has of the file's content."""
        content = list[bytes]()
        for event in self._reader.feed(data):
            if isinstance(event, PartBegun):
                self._begin(event)
            elif self._name == _FILE:
                self._take(event.data)
                content.append(event.data)
            elif self._name in _FIELDS:
                self._add(self._name, event.data)
        return b"".join(content)

    def finish(self) -> Upload:
        """Return what the form says, which is whole now."""
        self._reader.finish()
        purpose = self._text("purpose")
        if purpose != PURPOSE:
            what = f"is {purpose[:64]!r}" if purpose else "is missing"
            raise InvalidRequest(FieldViolation("purpose", f"{what}; expected {PURPOSE}: files serve batches here"))
        if self._filename is None:
            what = "is missing; expected a part of the form with a filename, which has a request on each line"
            raise InvalidRequest(FieldViolation(_FILE, what))
        seconds = self._seconds()
        self._end_line(b"")
        self._lines.finish()
        return Upload(self._filename, self._size, seconds, len(self._lines.numbers), tuple(sorted(self._lines.urls)))

    def _begin(self, part: PartBegun) -> None:
        if part.name != _FILE or not part.filename:
            # A file input of a browser without a file has an empty name.
            self._name = part.name if part.name != _FILE else None
            return
        if self._filename is not None:
            raise InvalidRequest(FieldViolation(_FILE, "comes twice; expected one file"))
        self._name, self._filename = _FILE, checked_name(part.filename)

    def _add(self, name: str, data: bytes) -> None:
        self._fields[name] = self._fields.get(name, b"") + data
        if len(self._fields[name]) > _MOST_FIELD:
            raise InvalidRequest(FieldViolation(name, f"has more than {_MOST_FIELD} bytes"))

    def _take(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            raise BodyTooLarge(f"the file has more bytes than are taken; expected at most {self._most}")
        first, *others = data.split(b"\n")
        if others:
            self._end_line(first)
            *others, first = others
            for line in others:
                self._lines.take(line)
        self._begun.append(first)
        self._begun_size += len(first)
        if self._begun_size > limits.MAX_HTTP_BODY_BYTES:
            self._end_line(b"")
            self._lines.finish()  # names it
        if len(self._lines.numbers) > limits.MAX_BATCH_LINES:
            what = f"has more than {limits.MAX_BATCH_LINES} requests; expected at most so many: send several files"
            raise InvalidRequest(FieldViolation(_FILE, what))

    def _end_line(self, end: bytes) -> None:
        self._lines.take(b"".join([*self._begun, end]))
        self._begun, self._begun_size = [], 0

    def _seconds(self) -> int:
        anchor, given = self._text(_ANCHOR), self._text(_SECONDS)
        if not anchor and not given:
            return limits.BATCH_FILE_SECONDS
        if anchor != "created_at":
            raise InvalidRequest(FieldViolation("expires_after.anchor", f"is {anchor[:64]!r}; expected created_at"))
        return checked_seconds("expires_after.seconds", given)

    def _text(self, name: str) -> str:
        return self._fields.get(name, b"").decode(errors="replace").strip()


def checked_seconds(field: str, given: str) -> int:
    """Return the seconds for which a file is to be kept. Raises InvalidRequest."""
    least, most = limits.MIN_BATCH_FILE_SECONDS, limits.MAX_BATCH_FILE_SECONDS
    if not given.isascii() or not given.isdecimal() or not least <= int(given[:12]) <= most:
        raise InvalidRequest(FieldViolation(field, f"is {given[:64]!r}; expected {least} to {most}"))
    return int(given)


def checked_name(name: str) -> str:
    """Return the name of a file, which is shown and names nothing on disk. Raises InvalidRequest."""
    if (
        not 0 < len(name) <= limits.MAX_FILE_NAME_CHARS
        or not name.isprintable()
        or name in (".", "..")
        or any(each in name for each in "/\\")
    ):
        what = f"has the name {name[:64]!r}; expected at most {limits.MAX_FILE_NAME_CHARS} characters, and no path"
        raise InvalidRequest(FieldViolation(_FILE, what))
    return name
