"""Which answers to a request of a batch are none yet, and when to ask again."""

from __future__ import annotations

from typing import Final

from common.backoff import Backoff

# Statuses of a server that is busy, drains, or is behind a proxy that cannot reach it.
AGAIN: Final = frozenset({429, 502, 503, 504})
BACKOFF: Final = Backoff(first=0.25, longest=30.0, jitter=0.5)
# A server may ask for a longer pause than the longest own one, up to this.
_LONGEST_ASKED_S: Final = 60.0


def asked_pause(retry_after: str) -> float:
    """Return the seconds that a server asks for in its header; 0 where it asks for none, or for a date."""
    try:
        return min(max(0.0, float(retry_after)), _LONGEST_ASKED_S)
    except ValueError:
        return 0.0
