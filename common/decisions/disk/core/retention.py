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

    `open_bytes` is the size of the open segment with what is written next.
    """
    total = open_bytes + sum(each.size for each in complete)
    gone: list[int] = []
    for each, newest_ns in zip(complete, times_of(complete, now_ns), strict=True):
        if total <= bounds.max_bytes and now_ns - newest_ns <= bounds.max_age_ns:
            break
        gone.append(each.number)
        total -= each.size
    return tuple(gone)


def times_of(segments: Sequence[Segment], now_ns: int) -> tuple[int, ...]:
    """Return the times that the ages of segments count from, in the same order.

    A segment has a time from the future when the clock was put back. It is older than the segments after it, and gets
    the time of the next one that has come; without such a one it counts as new.
    """
    times: list[int] = []
    next_ns = now_ns
    for each in reversed(segments):
        next_ns = each.newest_ns if each.newest_ns <= now_ns else next_ns
        times.append(next_ns)
    return tuple(reversed(times))


def is_full(size: int, more: int, began_ns: int, newest_ns: int, bounds: Bounds, now_ns: int) -> bool:
    """Return whether a segment of `size` bytes ends before `more` bytes.

    Its records came from `began_ns` to `newest_ns`. One from the future ends, so that it can age: see `times_of`.
    """
    if began_ns > now_ns or newest_ns > now_ns:
        return True
    return size + more > bounds.segment_bytes or now_ns - began_ns > bounds.segment_ns
