"""Text that fits into a column."""

from __future__ import annotations


def cut(text: str, width: int) -> str:
    """Return text of at most `width` characters; an ellipsis ends one that was longer."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
