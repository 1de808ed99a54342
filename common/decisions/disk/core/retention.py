"""Which segments of a decision log are kept, and when a segment is full. Times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# A log has about so many segments at its bounds: one that is dropped takes about so great a share of the log.
_SEGMENTS: Final = 16
_LARGEST_SEGMENT: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a log may take: bytes of all segments, and the age of a segment's newest record."""

    max_bytes: int
    max_age_ns: int

    @property
    def segment_bytes(self) -> int:
        return min(self.max_bytes // _SEGMENTS, _LARGEST_SEGMENT)

    @property
    def segment_ns(self) -> int:
        return self.max_age_ns // _SEGMENTS


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment on disk: its number, its bytes, and the time of its newest record."""

    number: int
    size: int
    newest_ns: int


def expired(complete: Sequence[Segment], open_bytes: int, bounds: Bounds, now_ns: int) -> tuple[int, ...]:
    """Return the numbers of the complete segments to remove: the oldest ones, until the rest is within the bounds.

    `open_bytes` is the size of the open segment with what is written next. A segment from the future is kept for its
    size: the clock was put back.
    """
    total = open_bytes + sum(each.size for each in complete)
    gone: list[int] = []
    for each in complete:
        if total <= bounds.max_bytes and now_ns - each.newest_ns <= bounds.max_age_ns:
            break
        gone.append(each.number)
        total -= each.size
    return tuple(gone)


def is_full(size: int, more: int, began_ns: int, bounds: Bounds, now_ns: int) -> bool:
    """Return whether a segment of `size` bytes, whose first record came at `began_ns`, ends before `more` bytes."""
    return size + more > bounds.segment_bytes or now_ns - began_ns > bounds.segment_ns
