"""The files of a decision log: the gzip members in them, when one is full, and which are kept. Times are in ns.

A file has records as lines of JSON, compressed, so that `zcat` reads it. Each flush is a gzip member or more: what was
flushed is read however the file ends, and a damaged member costs its own lines. The comment in the head of a member is
`quire FIRST LAST DROPPED`: the times of its first and last record, and how many were dropped before them. So a reader
passes by the members of other times without decompressing them.

Standard library and `limits` alone.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.limits import MAX_LOG_MEMBER_BYTES

# A gzip head that has a comment, and no time, flags or system; then how our comments begin.
_MARK: Final = b"\x1f\x8b\x08\x10\0\0\0\0\0\xffquire "
_HEAD: Final = re.compile(re.escape(_MARK) + rb"(-?\d{1,19}) (-?\d{1,19}) (\d{1,19})\0")
MARK_BYTES: Final = len(_MARK)
_END: Final = struct.Struct("<II")
_GZIP: Final = 16 + zlib.MAX_WBITS
# Level 6 takes twice as long as level 3 for a sixth of the bytes; level 1 saves next to nothing.
_LEVEL: Final = 3

# A log has about so many files at its bounds: one that is dropped takes about so great a share of the log.
_FILES: Final = 16
_LARGEST_FILE: Final = 16 << 20

Timed = tuple[int, bytes]
"""The line of a record, with its newline, and the time of the record."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a log may take: bytes of all files, and the age of a file's newest record."""

    max_bytes: int
    max_age_ns: int

    @property
    def file_bytes(self) -> int:
        return min(self.max_bytes // _FILES, _LARGEST_FILE)

    @property
    def file_ns(self) -> int:
        return self.max_age_ns // _FILES


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file on disk: its number, its bytes, and the time of its newest record."""

    number: int
    size: int
    newest_ns: int


@dataclass(frozen=True, slots=True)
class Member:
    """A gzip member from byte `start` of a file: it ends at `stop`, where the next one begins, or before.

    `dropped` records were never written; they were made before those of the member.
    """

    start: int
    stop: int
    first_ns: int
    last_ns: int
    dropped: int


def expired(complete: Sequence[LogFile], open_bytes: int, bounds: Bounds, now_ns: int) -> tuple[int, ...]:
    """Return the numbers of the complete files to remove: the oldest ones, until the rest is within the bounds.

    `open_bytes` is the size of the open file with what is written next.
    """
    total = open_bytes + sum(each.size for each in complete)
    gone: list[int] = []
    for each, newest_ns in zip(complete, times_of(complete, now_ns), strict=True):
        if total <= bounds.max_bytes and now_ns - newest_ns <= bounds.max_age_ns:
            break
        gone.append(each.number)
        total -= each.size
    return tuple(gone)


def times_of(files: Sequence[LogFile], now_ns: int) -> tuple[int, ...]:
    """Return the times that the ages of files count from, in the same order.

    A file has a time from the future when the clock was put back. It is older than the files after it, and gets the
    time of the next one that has come; without such a one it counts as new.
    """
    times: list[int] = []
    next_ns = now_ns
    for each in reversed(files):
        next_ns = each.newest_ns if each.newest_ns <= now_ns else next_ns
        times.append(next_ns)
    return tuple(reversed(times))


def is_full(size: int, more: int, began_ns: int, newest_ns: int, bounds: Bounds, now_ns: int) -> bool:
    """Return whether a file of `size` bytes ends before `more` bytes.

    Its records came from `began_ns` to `newest_ns`. One from the future ends, so that it can age: see `times_of`.
    """
    if began_ns > now_ns or newest_ns > now_ns:
        return True
    return size + more > bounds.file_bytes or now_ns - began_ns > bounds.file_ns


def member_of(records: Sequence[Timed], dropped: int = 0) -> bytes:
    """Return a gzip member with one record or more."""
    lines = b"".join(line for _, line in records)
    times = [time_ns for time_ns, _ in records]
    comment = b"%d %d %d\0" % (min(times), max(times), dropped)
    deflated = zlib.compress(lines, _LEVEL, -zlib.MAX_WBITS)
    return _MARK + comment + deflated + _END.pack(zlib.crc32(lines), len(lines))


def is_ours(data: bytes) -> bool:
    """Return whether a file that begins like this is of a decision log; a killed process may leave less."""
    return data.startswith(_MARK) or _MARK.startswith(data)


def members_in(data: bytes) -> tuple[Member, ...]:
    """Return the members of a file, whatever its bytes are."""
    heads = list(_heads_in(data))
    stops = [*(each.start() for each in heads[1:]), len(data)]
    return tuple(Member(each.start(), stop, *map(int, each.groups())) for each, stop in zip(heads, stops, strict=False))


def _heads_in(data: bytes) -> Iterator[re.Match[bytes]]:
    at = -1
    while (at := data.find(_MARK, at + 1)) >= 0:
        if found := _HEAD.match(data, at):
            yield found


def body_of(data: bytes, member: Member) -> tuple[bytes, int]:
    """Return the lines of a member, and where it ends; no lines and its start where it is cut off.

    Raises ValueError when it cannot be decompressed.
    """
    inflate = zlib.decompressobj(_GZIP)
    try:
        lines = inflate.decompress(data[member.start : member.stop], MAX_LOG_MEMBER_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(lines) > MAX_LOG_MEMBER_BYTES:
        raise ValueError(f"has more than {MAX_LOG_MEMBER_BYTES:,} bytes")
    return (lines, member.stop - len(inflate.unused_data)) if inflate.eof else (b"", member.start)


def end_of(data: bytes) -> int | None:
    """Return where the next member of a file may be written; None where damage stands at its end.

    It is less than the length where the last write was cut off: the process was killed, or the machine lost its power.
    """
    end, members = 0, members_in(data)
    if members:
        try:
            lines, end = body_of(data, members[-1])
        except ValueError:
            return None
        if not lines:
            return end
    rest = data[end:]
    is_head = _MARK.startswith(rest) or (rest.startswith(_MARK) and b"\0" not in rest[MARK_BYTES:])
    return end if is_head or not any(rest) else None


def packed(records: Iterable[Timed], member_bytes: int) -> list[list[Timed]]:
    """Return records in groups for members of about `member_bytes` before compression, each of one record or more."""
    groups: list[list[Timed]] = []
    room = 0
    for each in records:
        size = len(each[1])
        if size > room or not groups:
            groups.append([])
            room = member_bytes
        groups[-1].append(each)
        room -= size
    return groups
