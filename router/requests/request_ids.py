"""Ids of requests: those that clients choose, and those that the router makes, are apart.

A correlation id is a client's name for one or several requests. Nothing is refused or counted by it.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from common.contracts.limits import MAX_REQUEST_ID_CHARS

# No id of a client begins so: an automatic id can neither be guessed (128 random bits) nor be taken.
AUTOMATIC_PREFIX: Final = "quire-"
_CHOSEN: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]")


def automatic_id() -> str:
    """Return a new id for a request whose client chose none."""
    return AUTOMATIC_PREFIX + secrets.token_hex(16)


def recorded_id(correlation: str) -> str:
    """Return a correlation id for records; "" for one like the router's own, which would hide another request's."""
    return "" if correlation.startswith(AUTOMATIC_PREFIX) else correlation


def is_own_choice(text: str) -> bool:
    """Return whether a client may call its request so."""
    return _CHOSEN.fullmatch(text) is not None and not text.startswith(AUTOMATIC_PREFIX)


def new_trace_id() -> str:
    return secrets.token_hex(16)


def correlation_id(text: str) -> str:
    """Return a client's id as headers, logs and traces can hold it: cut, with ? for what is not printable ASCII."""
    return _UNPRINTABLE.sub("?", text.strip()[:MAX_REQUEST_ID_CHARS]).rstrip()
