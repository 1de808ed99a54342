"""Lets few log lines of one kind through, where a peer could cause as many as it likes."""

from __future__ import annotations

import time
from collections.abc import Callable


class RareLines:
    """At most `most` lines of a kind in `seconds`; the first line after these says how many were held back."""

    def __init__(self, seconds: float, most: int = 1, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._most, self._monotonic = seconds, most, monotonic
        self._began = float("-inf")
        self._lines = self._held_back = 0

    def next(self) -> int | None:
        """Return the number of lines that were held back since the last one, or None to hold back this one too."""
        now = self._monotonic()
        if now - self._began >= self._seconds:
            self._began, self._lines = now, 0
        if self._lines == self._most:
            self._held_back += 1
            return None
        self._lines += 1
        held_back, self._held_back = self._held_back, 0
        return held_back
