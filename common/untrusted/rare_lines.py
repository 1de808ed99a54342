"""Lets few log lines of one kind through, where a peer could cause as many as it likes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

# A password may have any character but a space; the bound keeps the search linear.
_USER_INFO: Final = re.compile(r"""(\w+://)[^\s"']{0,512}@""")


# Hides user names and passwords of URLs, such as that of Redis, in log lines and error messages.
def redacted(text: str) -> str:
    """Return a text with `***` in place of what stands before the @ of a URL."""
    return _USER_INFO.sub(r"\1***@", text) if "@" in text else text


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
