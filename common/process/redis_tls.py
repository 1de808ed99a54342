"""The arguments of Redis clients for `rediss://`, the same in every service."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def redis_tls(ca: Path | None) -> dict[str, Any]:
    """Return the arguments that make a client trust the CA in a PEM file; without one it trusts what Python trusts."""
    return {} if ca is None else {"ssl_ca_certs": str(ca)}
