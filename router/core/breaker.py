"""A circuit breaker: a neighbour that keeps failing is left alone for a while, so that its absence costs nothing."""

from __future__ import annotations


class CircuitBreaker:
    """Opens after `threshold` failures in a row, for `first` seconds and twice as long each time, up to `most`.

    When that time is over one question is let through; its outcome closes the breaker or opens it again.
    """

    def __init__(self, threshold: int = 3, first: float = 1.0, most: float = 10.0) -> None:
        self._threshold, self._first, self._most = threshold, first, most
        self._failures = 0
        self._open_until = 0.0

    def allows(self, now: float) -> bool:
        """Return whether to ask now. Who is let through after a pause must report the outcome."""
        if self._failures < self._threshold:
            return True
        if now < self._open_until:
            return False
        # Nobody else is let through while this one tries.
        self._open_until = now + self._first
        return True

    def succeeded(self) -> None:
        """An answer came."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """No answer came."""
        self._failures += 1
        over = self._failures - self._threshold
        if over >= 0:
            self._open_until = now + min(self._most, self._first * 2.0 ** min(over, 30))

    @property
    def healthy(self) -> bool:
        """Whether the last question got an answer, or none was asked."""
        return self._failures == 0
