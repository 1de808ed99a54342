"""Text that fits into a column."""

from __future__ import annotations

from typing import Final

from rich.text import Text

# A word that takes more than this part of the line is cut, for no word would be left otherwise.
_LONG_WORD: Final = 0.5


def cut(text: str, width: int) -> str:
    """Return text of at most `width` characters; an ellipsis ends one that was longer."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def cut_line(line: Text, width: int) -> None:
    """Cut a line to `width` cells behind a whole word; an ellipsis ends one that was longer."""
    if line.cell_len <= width:
        return
    whole = line.plain
    line.truncate(max(0, width - 1))
    end = len(line.plain) if whole[len(line.plain)] == " " else line.plain.rfind(" ")
    if end > _LONG_WORD * width:
        line.truncate(end)
    line.rstrip()
    line.append("…")
