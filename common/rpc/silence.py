"""How long the other end of a stream may say nothing before it counts as one that stands still.

A process that is stopped, or that hangs, on a host that runs still acknowledges packets. gRPC waits a minute for it. So
an end that runs sends a pulse at times, and its other end bounds the silence. A watcher that did not run itself has
heard nothing either, so the time that it missed does not count.
"""

from __future__ import annotations

import math
from typing import Final

SILENCE_S: Final = 10.0
"""Seconds that workers bear from a router or a manager. A client bears 15 s."""
_PULSES: Final = 6
_SHORTEST_S: Final = 0.01


def pulse_seconds(limit: float) -> float | None:
    """Return the seconds between two pulses, and between two looks, for a bound on silence; None without a bound."""
    return max(_SHORTEST_S, limit / _PULSES) if math.isfinite(limit) and limit > 0.0 else None


class Silence:
    """The silence of the other end of one stream, as its watcher sees it in looks that are a pulse apart."""

    def __init__(self, limit: float, now: float) -> None:
        """`limit` and `now` are in seconds. Raises ValueError for a limit that is none."""
        every = pulse_seconds(limit)
        if every is None:
            raise ValueError(f"a bound on silence of {limit:g} s; expected more than 0")
        self.limit, self.every = limit, every
        self._heard = self._looked = now

    def heard(self, now: float) -> None:
        """Note a message, of whatever kind."""
        self._heard = now

    def over(self, now: float) -> bool:
        """Look: return whether the other end has said nothing for longer than the limit while this one ran."""
        missed = max(0.0, now - self._looked - self.every)
        self._looked = now
        self._heard = min(now, self._heard + missed)
        return now - self._heard > self.limit
