"""What gap is usual at a worker: a median of its last requests, once there are enough."""

from __future__ import annotations

import pytest

from router.observe.usual_gaps import UsualGaps


def test_a_few_requests_say_nothing_yet() -> None:
    gaps = UsualGaps()
    for number in range(7):
        gaps.add("w0", 0.01 * number)
    assert gaps.usual("w0") == 0.0
    gaps.add("w0", 0.07)
    assert gaps.usual("w0") == pytest.approx(0.035)
    assert gaps.usual("w1") == 0.0


def test_the_last_requests_count_and_one_slow_one_changes_nothing() -> None:
    gaps = UsualGaps()
    for gap in [9.0] * 100 + [0.01] * 63 + [5.0]:
        gaps.add("w0", gap)
    assert gaps.usual("w0") == 0.01


def test_workers_that_served_long_ago_are_forgotten() -> None:
    gaps = UsualGaps()
    for number in range(5_000):
        for _ in range(8):
            gaps.add(f"w{number}", 0.01)
    assert (gaps.usual("w0"), gaps.usual("w4999")) == (0.0, 0.01)
