"""Whether somebody listens at a Redis URL, in words for the first line of a suite's start. Standard library only."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import urlsplit

_PATIENCE_S: Final = 2.0
_PORT: Final = 6379


def redis_words(url: str) -> str:
    """Return the state of the Redis at a URL, "" for none; the URL's password stays out of it."""
    address = url.rpartition("@")[2]
    if not address:
        return "none; flags name the workers"
    problem = _problem(url)
    if problem is None:
        return f"ready at {address}"
    return f"nothing answers at {address} ({problem}): prompts are routed without the prefix index until it does"


def _problem(url: str) -> str | None:
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_PATIENCE_S)
                probe.connect(parts.path)
        else:
            socket.create_connection((parts.hostname or "localhost", parts.port or _PORT), _PATIENCE_S).close()
    except (OSError, ValueError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()
    return None
