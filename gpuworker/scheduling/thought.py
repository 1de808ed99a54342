"""Follows the thoughts in one output, and ends a thought by force once its budget is spent.

What is forced depends on the output alone. So a sequence that is preempted or moved goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from common.contracts.types import ThoughtBudget


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class ThoughtFollower:
    """Takes in the tokens of an output. `spell` returns the bytes of a token, those of special tokens included.

    `forced` is the token that must come next; None where any may.
    """

    def __init__(self, budget: ThoughtBudget, spell: Callable[[int], bytes]) -> None:
        self._budget, self._spell = budget, spell
        self._opener, self._closer = budget.opener.encode(), budget.closer.encode()
        self._place = _Place.INSIDE if budget.is_open else _Place.BEFORE
        self._left = budget.max_tokens
        # The last bytes, which may be the beginning of a mark.
        self._tail = b""
        # Tokens of the end that are still to come.
        self._end: tuple[int, ...] = ()
        self._force_if_spent()

    @property
    def forced(self) -> int | None:
        return self._end[0] if self._end else None

    def take(self, token: int) -> None:
        """Take in the next token."""
        if self._end:
            self._end = self._end[1:]
            if not self._end:
                self._leave()
            return
        if self._place is _Place.AFTER:
            return
        text = self._tail + self._spell(token)
        if self._place is _Place.BEFORE:
            self._look_for_opener(text)
        else:
            self._left -= 1
            self._look_for_closer(text)
        self._force_if_spent()

    def _look_for_opener(self, text: bytes) -> None:
        found = text.find(self._opener) if self._budget.anywhere else len(text) - len(text.lstrip())
        if found >= 0 and text.startswith(self._opener, found):
            self._place, self._tail = _Place.INSIDE, b""
            self._look_for_closer(text[found + len(self._opener) :])
        elif self._budget.anywhere or self._opener.startswith(text.lstrip()):
            self._tail = _end_of(text, self._opener) if self._budget.anywhere else text.lstrip()
        else:
            self._leave()

    def _look_for_closer(self, text: bytes) -> None:
        if self._closer in text:
            self._leave()
        else:
            self._tail = _end_of(text, self._closer)

    def _leave(self) -> None:
        self._place = _Place.BEFORE if self._budget.anywhere else _Place.AFTER
        self._tail = b""

    def _force_if_spent(self) -> None:
        if self._place is _Place.INSIDE and self._left <= 0:
            self._end = self._budget.end_token_ids


def _end_of(text: bytes, mark: bytes) -> bytes:
    """Return the last bytes of a text, one fewer than a mark has."""
    return text[-(len(mark) - 1) :] if len(mark) > 1 else b""
