"""JSON of files that strangers made: what would take a parser's stack, or gigabytes, is refused in words beforehand.

A parser makes up to 100 bytes of memory of each byte, and goes down a level of the stack for each level of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from common.untrusted.json_shape import Shape

MOST_BYTES: Final = 128 << 20
"""More than any file of a checkpoint has besides its weights; the largest vocabularies have 35 MB."""
SHAPE: Final = Shape(values=8_000_000, members=2_000_000, containers=2_000_000, depth=100)
"""A vocabulary of 262,144 tokens with 600,000 merges as pairs has a quarter of this."""

_MOST_SHOWN, _MOST_LISTED = 60, 16


def parse(raw: bytes, shape: Shape = SHAPE, unique: bool = False) -> Any:
    """Return what a text in JSON holds; with `unique`, no object may have a name twice.

    Raises UnicodeDecodeError for what is not UTF-8, else ValueError with the reason.
    """
    if excess := shape.excess(raw):
        raise ValueError(f"it {excess}")
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b"\\ud" in raw or b"\\uD" in raw:
        _refuse_half_characters(found)
    return found


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {shown(name)} twice")
        found[name] = value
    return found


def _refuse_half_characters(found: Any) -> None:
    """Raise ValueError for a text that no encoding has, as an escape can spell it: printing it would fail."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text in it has half of a character (an escape from \\ud800 to \\udfff alone)") from None


def shown(value: object) -> str:
    """Return a value as a message has it, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    if isinstance(value, list):
        is_plain = len(value) <= _MOST_LISTED and not any(isinstance(each, list | dict) for each in value)
        return f"[{', '.join(map(shown, value))}]" if is_plain else "a list"
    if isinstance(value, dict):
        return "an object"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
