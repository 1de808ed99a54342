"""Finds whether a deadline caused the cancellation of an RPC: to the server both look alike."""

from __future__ import annotations

import math

# How early the cancellation by a client's own timer may come: reading clocks and sending messages take time.
_EARLY_SECONDS = 0.05


def is_expiry(timeout: float, left: float) -> bool:
    """Return whether a cancellation `left` seconds before the deadline means that the deadline has passed.

    `timeout` is the seconds that the RPC had at its start. Clients end an RPC at their deadline by themselves, and the
    server may see that before its own timer: gRPC rounds the timeout that it sends up to about three digits (10.01 s
    becomes 10.1 s).
    """
    rounding = 10.0 ** (math.floor(math.log10(timeout)) - 2) if timeout > 0.0 else 0.0
    return left <= _EARLY_SECONDS + rounding
