"""Pauses between attempts: each failure in a row doubles the pause up to a bound; jitter spreads the attempts."""

from __future__ import annotations

from dataclasses import dataclass

# Far beyond any use; a larger exponent of two would overflow a float.
_MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses in seconds, from `first` to `longest`. `jitter` is the share of a pause that is random, 0 to 1.

    With a jitter of 1 a pause lies anywhere between nothing and its bound, with 0.5 in the upper half of that.
    """

    first: float
    longest: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 < self.first <= self.longest and 0.0 <= self.jitter <= 1.0):
            raise ValueError(f"{self}: expected 0 < first <= longest, and a jitter of 0 to 1")

    def pause(self, failures: int, uniform: float = 1.0) -> float:
        """Return the pause after so many failures in a row, 1 or more; `uniform` is random in [0, 1)."""
        bound = min(self.longest, self.first * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
        return bound * (1.0 - self.jitter + self.jitter * uniform)
