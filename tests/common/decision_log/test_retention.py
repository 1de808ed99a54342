"""Which files leave, and when one is full."""

from __future__ import annotations

from common.decisions.log_files import Bounds, LogFile, expired, is_full, times_of

BOUNDS = Bounds(max_bytes=1_600, max_age_ns=160)
OLD = [LogFile(3, 400, newest_ns=100), LogFile(4, 500, newest_ns=200), LogFile(5, 600, newest_ns=210)]


def test_all_stay_within_the_bounds() -> None:
    assert expired(OLD, 100, BOUNDS, now_ns=260) == ()


def test_the_oldest_leave_until_the_rest_has_room() -> None:
    assert expired(OLD, 101, BOUNDS, now_ns=260) == (3,)
    assert expired(OLD, 501, BOUNDS, now_ns=260) == (3, 4)
    assert expired(OLD, 5_000, BOUNDS, now_ns=260) == (3, 4, 5)


def test_a_file_leaves_when_its_newest_record_is_too_old() -> None:
    assert expired(OLD, 0, BOUNDS, now_ns=261) == (3,)
    assert expired(OLD, 0, BOUNDS, now_ns=365) == (3, 4)
    assert expired(OLD, 0, BOUNDS, now_ns=1_000) == (3, 4, 5)


def test_a_clock_that_was_put_back_removes_nothing() -> None:
    assert expired(OLD, 0, BOUNDS, now_ns=5) == ()


def test_a_file_is_a_sixteenth_of_the_log() -> None:
    assert (BOUNDS.file_bytes, BOUNDS.file_ns) == (100, 10)
    assert Bounds(1 << 40, 1).file_bytes == 16 << 20
    assert not is_full(60, 40, 0, 10, BOUNDS, now_ns=10)
    assert is_full(60, 41, 0, 10, BOUNDS, now_ns=10)
    assert is_full(60, 40, 0, 10, BOUNDS, now_ns=11)


def test_a_file_from_the_future_is_full() -> None:
    assert is_full(60, 40, 11, 11, BOUNDS, now_ns=10)
    assert is_full(60, 40, 5, 11, BOUNDS, now_ns=10)


def test_a_file_from_the_future_leaves_with_the_next_one_of_a_time_that_has_come() -> None:
    """A clock was an hour ahead, and was put back: files 4 and 5 come from then."""
    found = [LogFile(3, 1, 90), LogFile(4, 1, 3_700), LogFile(5, 1, 3_800), LogFile(6, 1, 100), LogFile(7, 1, 200)]
    assert times_of(found, now_ns=210) == (90, 100, 100, 100, 200)
    assert expired(found, 0, BOUNDS, now_ns=260) == (3,)
    assert expired(found, 0, BOUNDS, now_ns=261) == (3, 4, 5, 6)
    assert expired(found[:3], 0, BOUNDS, now_ns=1_000) == (3,)  # no file follows: their age is not known
    assert expired(found[:3], 1_600, BOUNDS, now_ns=1_000) == (3, 4, 5)
