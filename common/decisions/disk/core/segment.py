"""A segment of a decision log: a head, then frames. A frame has the records of about one flush, compressed.

    segment   magic (6 bytes), version (u16), frames
    frame     length, checksum of the body (u32 each), times of the first and last record (i64 each),
              records, records dropped before them, checksum of these fields (u32 each), body
    body      zlib: records, each after its length (u32)

Numbers are little-endian. A record is opaque here. The head of a frame has a checksum of its own: a damaged body costs
the records of one frame, and the reader finds the next.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.limits import MAX_LOG_FRAME_BYTES

VERSION: Final = 1
_MAGIC: Final = b"QUIREd"
_HEAD: Final = struct.Struct("<6sH")
_FRAME: Final = struct.Struct("<IIqqII")
_CHECK: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size
FRAME_HEAD_BYTES: Final = _FRAME.size + _CHECK.size
# Level 1 is the fastest, and level 6 takes five times as long for a tenth of the bytes.
_LEVEL: Final = 1

Timed = tuple[int, bytes]
"""A record with its time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a segment: its body lies between `start` and `end`, its first record is number `first` of the segment.

    `dropped` records were never written; they were made before those of the frame.
    """

    start: int
    end: int
    first: int
    count: int
    first_ns: int
    last_ns: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a segment holds. `faults` say in words what cannot be read. `end` is where another frame may be written.

    `end` is less than the length where the last write was cut off, and None where nothing may be written.
    """

    frames: tuple[Frame, ...] = ()
    end: int | None = None
    faults: tuple[str, ...] = ()


def head() -> bytes:
    """Return the first bytes of a segment."""
    return _HEAD.pack(_MAGIC, VERSION)


def is_head(data: bytes) -> bool:
    """Return whether a file that begins like this is ours, of any version; a killed process may leave less."""
    return data.startswith(_MAGIC) or head().startswith(data)


def frame_of(records: Sequence[Timed], dropped: int = 0) -> bytes:
    """Return a frame with one record or more."""
    body = zlib.compress(b"".join(part for _, each in records for part in (_LENGTH.pack(len(each)), each)), _LEVEL)
    times = [time_ns for time_ns, _ in records]
    fields = _FRAME.pack(len(body), zlib.crc32(body), min(times), max(times), len(records), min(dropped, 0xFFFFFFFF))
    return fields + _CHECK.pack(zlib.crc32(fields)) + body


def contents_of(data: bytes) -> Contents:
    """Return the frames of a segment, whatever its bytes are."""
    if len(data) < HEAD_BYTES:
        return Contents(end=0) if head().startswith(data) else Contents(faults=(_NO_SEGMENT,))
    magic, version = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        return Contents(faults=(_NO_SEGMENT,))
    if version != VERSION:
        what = (
            f"has version {version} of the format, and this Quire reads version {VERSION}; use the Quire that wrote it"
        )
        return Contents(faults=(what,))
    return _frames_of(data)


_NO_SEGMENT: Final = "is no segment of a decision log; remove the file if it is in the wrong folder"


def _frames_of(data: bytes) -> Contents:
    frames: list[Frame] = []
    faults: list[str] = []
    at, first = HEAD_BYTES, 0
    while at < len(data):
        start = at + FRAME_HEAD_BYTES
        if start > len(data):
            return Contents(tuple(frames), at, tuple(faults))
        length, check, first_ns, last_ns, count, dropped = _FRAME.unpack_from(data, at)
        if zlib.crc32(data[at : start - _CHECK.size]) != _CHECK.unpack_from(data, start - _CHECK.size)[0]:
            if not any(data[at:]):  # the file grew, and its bytes never came: the machine lost its power
                return Contents(tuple(frames), at, tuple(faults))
            rest = f"{len(data) - at:,} bytes"
            faults.append(f"is corrupt at byte {at:,}: the last {rest} of it are not read")
            return Contents(tuple(frames), None, tuple(faults))
        end = start + length
        if end > len(data):
            return Contents(tuple(frames), at, tuple(faults))
        if zlib.crc32(data[start:end]) == check:
            frames.append(Frame(start, end, first, count, first_ns, last_ns, dropped))
        elif end == len(data):
            return Contents(tuple(frames), at, tuple(faults))
        else:
            faults.append(f"is corrupt at byte {at:,}: {count:,} of its records are not read")
        at, first = end, first + count
    return Contents(tuple(frames), at, tuple(faults))


def body_of(data: bytes, frame: Frame) -> bytes:
    """Return the records of a frame, each after its length. Raises ValueError when it has none that can be read."""
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(data[frame.start : frame.end], MAX_LOG_FRAME_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(body) > MAX_LOG_FRAME_BYTES or not inflate.eof:
        raise ValueError(f"has more than {MAX_LOG_FRAME_BYTES:,} bytes")
    return body


def records_of(body: bytes) -> tuple[bytes, ...]:
    """Return the records of a body. Raises ValueError when their lengths are wrong."""
    found, at = list[bytes](), 0
    while at < len(body):
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(body, at)[0] if start <= len(body) else len(body) + 1
        if end > len(body):
            raise ValueError("its lengths do not add up")
        found.append(body[start:end])
        at = end
    return tuple(found)


def packed(records: Iterable[Timed], frame_bytes: int) -> list[list[Timed]]:
    """Return records in groups for frames of about `frame_bytes` before compression, each of one record or more."""
    groups: list[list[Timed]] = []
    room = 0
    for each in records:
        size = _LENGTH.size + len(each[1])
        if size > room or not groups:
            groups.append([])
            room = frame_bytes
        groups[-1].append(each)
        room -= size
    return groups
