"""How much a JSON text would be in memory, found without parsing it: passes over bytes, at memory's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class Shape:
    """The most that a JSON text may have: entries of lists and objects, members of objects, lists and objects, levels.

    Entries and members count at every level.
    """

    values: int
    members: int
    containers: int
    depth: int

    def excess(self, text: bytes) -> str:
        """Return in words what a text in UTF-8 has too much of, "" if nothing. What is no JSON may pass."""
        if self._fits_whatever_is_in_strings(text):
            return ""
        # Without escaped backslashes and quotes, every other quote ends a string.
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') // 2 > self._strings:
            return f"has more than {self._strings} strings; expected at most {self.values} values"
        outside = b"".join(plain.split(b'"')[::2])
        brackets = outside.translate(_BRACKETS, _OTHERS)
        return self._too_many(outside, brackets.count(b"[")) or (
            f"is nested too deeply; expected at most {self.depth} lists and objects in each other"
            if _is_deeper(brackets, self.depth)
            else ""
        )

    @property
    def _strings(self) -> int:
        """The most strings: an entry has one, a member has its name too, and the text may be one."""
        return self.values + self.members + 1

    def _fits_whatever_is_in_strings(self, text: bytes) -> bool:
        opened = text.count(b"[") + text.count(b"{")
        return (
            opened <= min(self.depth, self.containers)
            and text.count(b",") + opened <= self.values
            and text.count(b":") <= self.members
        )

    def _too_many(self, outside: bytes, containers: int) -> str:
        """Return what is too much in a text without its strings."""
        counts = (
            ("lists and objects", containers, self.containers),
            ("members of objects", outside.count(b":"), self.members),
            ("values", outside.count(b",") + containers, self.values),
        )
        return next(
            (f"has {count} {what}; expected at most {most}" for what, count, most in counts if count > most), ""
        )


def _is_deeper(brackets: bytes, most: int) -> bool:
    """Return whether brackets are nested deeper; each pass takes away the innermost level."""
    for _ in range(most):
        before, brackets = len(brackets), brackets.replace(b"[]", b"")
        if len(brackets) == before:
            return before > most  # brackets without a partner: no JSON, and a parser may go down as far
    return bool(brackets)
