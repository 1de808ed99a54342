"""The identity of the pool: some parts come from the router's own checkpoint, the rest from the first worker."""

from __future__ import annotations

from dataclasses import fields, replace

from common.contracts.errors import Mismatch
from common.contracts.types import KvGeometry, PoolIdentity

UNKNOWN_GEOMETRY = KvGeometry(0, 0, 0, 0, "")
UNKNOWN_ARITHMETIC = ""
UNKNOWN_POOLING = ""


def differences(ours: PoolIdentity, theirs: PoolIdentity) -> tuple[Mismatch, ...]:
    """Return the parts that are known on both sides and differ."""
    return adopt(ours, theirs).differences(theirs)


def adopt(ours: PoolIdentity, theirs: PoolIdentity) -> PoolIdentity:
    """Return `ours` with its unknown parts (empty, zero) taken from `theirs`."""
    unknown = {part.name: getattr(theirs, part.name) for part in fields(ours) if _is_unknown(getattr(ours, part.name))}
    return replace(ours, **unknown)


def is_complete(identity: PoolIdentity) -> bool:
    return not any(_is_unknown(getattr(identity, part.name)) for part in fields(identity))


def _is_unknown(value: object) -> bool:
    return value in ("", 0, UNKNOWN_GEOMETRY)
