"""Finds a stop text in text that comes a character at a time."""

from __future__ import annotations

from functools import lru_cache

from common.contracts.limits import MAX_STOP_STRINGS


class StopMatcher:
    """Follows one stop string through a text, a character at a time (Knuth, Morris and Pratt's automaton)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # How many characters of the stop string the text ends with; these are held back.
        self.matched = 0
        self._failure = _failure(stop)

    def step(self, character: str) -> bool:
        """Take the next character; return whether it completes the stop string."""
        if self.matched == len(self.stop):
            self.matched = self._failure[self.matched]
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._failure[self.matched]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


# The sequences of a request share the tables of its stop strings; so do requests with the same ones.
@lru_cache(maxsize=4 * MAX_STOP_STRINGS)
def _failure(stop: str) -> tuple[int, ...]:
    """Return, for each length, how long a proper prefix of the stop its first `length` characters end with."""
    failure = [0] * (len(stop) + 1)
    border = 0
    for length in range(2, len(stop) + 1):
        while border and stop[border] != stop[length - 1]:
            border = failure[border]
        border += stop[border] == stop[length - 1]
        failure[length] = border
    return tuple(failure)
