"""One line in a while, and the number of those that were held back."""

from __future__ import annotations

from common.untrusted.rare_lines import RareLines


def test_a_line_says_how_many_were_held_back_before_it() -> None:
    now = 0.0
    lines = RareLines(10.0, lambda: now)
    assert [lines.next() for _ in range(4)] == [0, None, None, None]
    now = 9.9
    assert lines.next() is None
    now = 10.0
    assert [lines.next(), lines.next()] == [4, None]
    now = 30.0
    assert lines.next() == 1
