"""How much a JSON text would be in memory, found without parsing it: passes over bytes, at memory's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts import limits

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

    def excess(self, *texts: bytes) -> str:
        """Return in words what texts in UTF-8 have too much of together, "" if nothing. What is not JSON may pass."""
        if self._fit_whatever_is_in_strings(texts):
            return ""
        strings = containers = members = values = 0
        for text in texts:
            # Without escaped backslashes and quotes, every other quote ends a string.
            plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
            strings += plain.count(b'"') // 2
            if strings > self._strings:
                return f"has more than {self._strings} strings; expected at most {self.values} values"
            outside = b"".join(plain.split(b'"')[::2])
            brackets = outside.translate(_BRACKETS, _OTHERS)
            opened = brackets.count(b"[")
            containers, members = containers + opened, members + outside.count(b":")
            values += outside.count(b",") + opened
            if words := self._too_many(containers, members, values):
                return words
            if _is_deeper(brackets, self.depth):
                return f"is nested too deeply; expected at most {self.depth} lists and objects in each other"
        return ""

    @property
    def _strings(self) -> int:
        """The most strings: an entry has one, a member has its name too, and the text may be one."""
        return self.values + self.members + 1

    def _fit_whatever_is_in_strings(self, texts: Sequence[bytes]) -> bool:
        opened = sum(text.count(b"[") + text.count(b"{") for text in texts)
        return (
            opened <= min(self.depth, self.containers)
            and sum(text.count(b",") for text in texts) + opened <= self.values
            and sum(text.count(b":") for text in texts) <= self.members
        )

    def _too_many(self, containers: int, members: int, values: int) -> str:
        """Return which of these counts is too much."""
        counts = (
            ("lists and objects", containers, self.containers),
            ("members of objects", members, self.members),
            ("values", values, self.values),
        )
        return next(
            (f"has {count} {what}; expected at most {most}" for what, count, most in counts if count > most), ""
        )


BODY: Final = Shape(
    limits.MAX_HTTP_BODY_VALUES,
    limits.MAX_HTTP_BODY_MEMBERS,
    limits.MAX_HTTP_BODY_CONTAINERS,
    limits.MAX_HTTP_BODY_DEPTH,
)
"""What a client may send at once: it takes at most 20 ms to parse (docs/decisions/0048)."""


def _is_deeper(brackets: bytes, most: int) -> bool:
    """Return whether brackets are nested deeper; each pass takes away the innermost level."""
    for _ in range(most):
        before, brackets = len(brackets), brackets.replace(b"[]", b"")
        if len(brackets) == before:
            return before > most  # brackets without a partner: no JSON, and a parser may go down as far
    return bool(brackets)
