"""One line in a while, and the number of those that were held back."""

from __future__ import annotations

from common.untrusted.rare_lines import RareLines


def test_a_line_says_how_many_were_held_back_before_it() -> None:
    now = 0.0
    lines = RareLines(10.0, monotonic=lambda: now)
    assert [lines.next() for _ in range(4)] == [0, None, None, None]
    now = 9.9
    assert lines.next() is None
    now = 10.0
    assert [lines.next(), lines.next()] == [4, None]
    now = 30.0
    assert lines.next() == 1


def test_as_many_lines_as_may_be_come_in_each_period() -> None:
    now = 0.0
    lines = RareLines(1.0, 2, lambda: now)
    assert [lines.next() for _ in range(5)] == [0, 0, None, None, None]
    now = 1.0
    assert [lines.next() for _ in range(3)] == [3, 0, None]
