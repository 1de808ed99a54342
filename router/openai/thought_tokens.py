"""Counts the tokens of an answer's thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.dialects.parts import CallBegun, Part, Thought


@dataclass(slots=True)
class ThoughtTokens:
    """Counts tokens of thoughts: exactly where tokens come one by one, else by the characters of the parts."""

    count: int = 0
    _pending: int = 0
    _thinking: bool = False

    def take(self, tokens: int, parts: Sequence[Part]) -> None:
        """Count tokens whose text, with what was held back before, completed these parts."""
        self._pending += tokens
        lengths = [len(part.name if isinstance(part, CallBegun) else part.text) for part in parts]
        if not any(lengths):
            return
        thought = sum(length for length, part in zip(lengths, parts, strict=True) if isinstance(part, Thought))
        self.count += round(self._pending * thought / sum(lengths))
        self._pending, self._thinking = 0, isinstance(parts[-1], Thought)

    def end(self) -> int:
        """Return the count, with tokens at the end of a thought that was cut off."""
        return self.count + (self._pending if self._thinking else 0)
