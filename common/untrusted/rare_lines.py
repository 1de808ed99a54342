"""Lets few log lines of one kind through, where a peer could cause as many as it likes."""

from __future__ import annotations

import time
from collections.abc import Callable


class RareLines:
    """At most one line of a kind in `seconds`; the next line says how many were held back."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._monotonic = seconds, monotonic
        self._last = float("-inf")
        self._held_back = 0

    def next(self) -> int | None:
        """Return the number of lines that were held back since the last one, or None to hold back this one too."""
        now = self._monotonic()
        if now - self._last < self._seconds:
            self._held_back += 1
            return None
        held_back, self._held_back, self._last = self._held_back, 0, now
        return held_back
