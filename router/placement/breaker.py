"""A circuit breaker: a service that keeps failing is not called for a while, so that its absence costs nothing."""

from __future__ import annotations

from collections.abc import Callable


class CircuitBreaker:
    """Opens after `threshold` failures in a row. `pause` gives the seconds that it stays open, the 1st, 2nd, ... time.

    After the pause it lets one call through; the outcome of that call closes the breaker or opens it again.
    """

    def __init__(self, pause: Callable[[int], float], threshold: int = 3) -> None:
        self._pause, self._threshold = pause, threshold
        self._failures = 0
        self._open_until = 0.0

    def allows(self, now: float) -> bool:
        """Return whether to call now. A caller that is let through must report the outcome."""
        if self._failures < self._threshold:
            return True
        if now < self._open_until:
            return False
        # No other call is let through while this one is under way.
        self._open_until = now + self._pause(1)
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> None:
        self._failures += 1
        openings = self._failures - self._threshold + 1
        if openings > 0:
            self._open_until = now + self._pause(openings)

    @property
    def failures(self) -> int:
        """How many calls in a row have failed."""
        return self._failures

    @property
    def healthy(self) -> bool:
        """Whether the last call was answered, or none was made."""
        return self._failures == 0
