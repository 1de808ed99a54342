"""How many images the engine's thread takes or lands at once, so that steps and their tokens are not late for them."""

from __future__ import annotations

from typing import Final

_PIECE: Final = 0.00025
"""Seconds that images may take at once while a step runs: by so much its tokens may be late."""
_SHARE: Final = 0.1
"""The share of the time that images take while steps run."""
_RISE: Final = 1.1
"""By how much an image may take longer than those before it: what is above that was a wait for the processor."""


class ImagePace:
    """Readings of a clock come in as `now`. While no step runs, there is no pace but that of bytes."""

    __slots__ = ("_most", "_next", "_seconds")

    def __init__(self, image_bytes: int, bytes_at_once: int) -> None:
        """At most so many bytes are taken at once, or one image if that has more."""
        self._most = max(1, bytes_at_once // max(1, image_bytes))
        self._seconds = 0.0  # that an image takes, as learnt
        self._next = 0.0  # when the next ones may be taken while a step runs

    def allowed(self, now: float, steps_run: bool) -> int:
        """Return how many images may be taken or landed now."""
        if not steps_run:
            return self._most
        if now < self._next:
            return 0
        return self._most if not self._seconds else max(1, min(self._most, int(_PIECE / self._seconds)))

    def note(self, images: int, began: float, ended: float) -> None:
        """Take in that so many images, at least one, were taken or landed between two readings."""
        each = (ended - began) / images
        self._seconds = min(each, _RISE * self._seconds) if self._seconds else each
        self._next = ended + images * self._seconds * (1.0 / _SHARE - 1.0)

    def wait(self, now: float) -> float:
        """Return the seconds until images may be taken although steps run."""
        return max(0.0, self._next - now)
