"""Which segments leave, and when one is full."""

from __future__ import annotations

from common.decisions.disk.core.retention import Bounds, Segment, expired, is_full

BOUNDS = Bounds(max_bytes=1_600, max_age_ns=160)
OLD = [Segment(3, 400, newest_ns=100), Segment(4, 500, newest_ns=200), Segment(5, 600, newest_ns=210)]


def test_all_stay_within_the_bounds() -> None:
    assert expired(OLD, 100, BOUNDS, now_ns=260) == ()


def test_the_oldest_leave_until_the_rest_has_room() -> None:
    assert expired(OLD, 101, BOUNDS, now_ns=260) == (3,)
    assert expired(OLD, 501, BOUNDS, now_ns=260) == (3, 4)
    assert expired(OLD, 5_000, BOUNDS, now_ns=260) == (3, 4, 5)


def test_a_segment_leaves_when_its_newest_record_is_too_old() -> None:
    assert expired(OLD, 0, BOUNDS, now_ns=261) == (3,)
    assert expired(OLD, 0, BOUNDS, now_ns=365) == (3, 4)
    assert expired(OLD, 0, BOUNDS, now_ns=1_000) == (3, 4, 5)


def test_a_clock_that_was_put_back_removes_nothing() -> None:
    assert expired(OLD, 0, BOUNDS, now_ns=5) == ()


def test_a_segment_is_a_sixteenth_of_the_log() -> None:
    assert (BOUNDS.segment_bytes, BOUNDS.segment_ns) == (100, 10)
    assert Bounds(1 << 40, 1).segment_bytes == 16 << 20
    assert not is_full(60, 40, 0, BOUNDS, now_ns=10)
    assert is_full(60, 41, 0, BOUNDS, now_ns=10)
    assert is_full(60, 40, 0, BOUNDS, now_ns=11)
