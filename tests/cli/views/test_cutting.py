"""Text is cut behind a whole word where that leaves most of the line."""

from __future__ import annotations

import pytest
from rich.text import Text

from cli.views.cutting import cut, cut_line


@pytest.mark.parametrize(
    ("text", "width", "left"),
    [
        ("0 shared and 1 fresh block", 26, "0 shared and 1 fresh block"),
        ("0 shared and 1 fresh block", 25, "0 shared and 1 fresh…"),
        ("0 shared and 1 fresh block", 21, "0 shared and 1 fresh…"),
        ("0 shared and 1 fresh block", 20, "0 shared and 1…"),
        ("quire-30c151a02ac2 ends", 12, "quire-30c15…"),
        ("a quire-30c151a02ac2", 12, "a quire-30c…"),
        ("\u6c34 \u6c34\u6c34\u6c34 \u6c34\u6c34", 12, "\u6c34 \u6c34\u6c34\u6c34…"),
        ("", 0, ""),
    ],
)
def test_a_line_is_cut_behind_a_word(text: str, width: int, left: str) -> None:
    line = Text(text)
    cut_line(line, width)
    assert line.plain == left
    assert line.cell_len <= width


def test_a_name_is_cut_at_any_character() -> None:
    assert [cut("quire-30c1", width) for width in (10, 9, 1)] == ["quire-30c1", "quire-30…", "…"]
