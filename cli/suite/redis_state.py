"""Whether somebody listens at a Redis URL, in words for the first line of a suite's start. Standard library only."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import urlsplit

from common.addresses.redis_url import is_sentinel_url, redis_addresses

_PATIENCE_S: Final = 2.0


def redis_words(url: str) -> str:
    """Return the state of the Redis at a URL, "" for none; the URL's login stays out of it."""
    if not url:
        return "none; flags name the workers"
    address = url.rpartition("@")[2].partition("?")[0]
    of = "the master that Sentinels name, " if is_sentinel_url(url) else ""
    problem = _problem(url)
    if problem is None:
        return f"ready at {of}{address}"
    return f"nothing answers at {address} ({problem}): prompts are routed without the prefix index until it does"


def _problem(url: str) -> str | None:
    """Return why nobody listens; None when somebody does. One Sentinel is enough."""
    problem = None
    try:
        for address in redis_addresses(url) or (urlsplit(url).path,):
            try:
                _connect(address)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            else:
                return None
    except ValueError as error:
        return str(error)
    return problem


def _connect(address: tuple[str, int] | str) -> None:
    if isinstance(address, tuple):
        socket.create_connection(address, _PATIENCE_S).close()
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PATIENCE_S)
        probe.connect(address)
