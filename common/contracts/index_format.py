"""Names and packing of the data that the KV manager writes to Redis and the router reads. Standard library only.

    {ns}:p:<16-byte hash>          string: an entry a worker, little-endian u16 slot and u32 generation; has a TTL
    {ns}:w:<slot>                  hash: worker_id, incarnation (hex), address, generation, session, group; no TTL
    {ns}:l:<slot>                  liveness of the slot's worker; has a TTL, renewed while the worker is attached
    {ns}:epoch                     counter of the epochs of all managers
    {ns}:fence:<group>             epoch of the manager of a group that may write; {ns}:fence without a group
    {ns}:pins:<group>              prefixes that operators pin: a StoredPins of kvmanager.proto; no TTL. A group that
                                   lacks the key begins with the value of {ns}:pins, of managers without a group
    {ns}:term:<group>              highest term of a group of managers in which one took an epoch; no TTL
    {group}:lease, {group}:term    lease of the manager that leads a group, and counter of terms; no TTL
    quire:discovery:workers        set of the ids of attached workers, and for a while of departed ones
    quire:discovery:worker:<id>    signature and JSON (`DiscoveredWorker`); has a TTL, renewed while attached

`ns` is `PoolIdentity.namespace`, a hash tag: all keys of an index lie in one cluster slot. `group` is a hash tag too.
An entry counts only if its generation is that in `{ns}:w:<slot>`. The manager draws a new generation whenever it
rebuilds or clears. Several groups may write one index, each for its own workers (`kvmanager/contracts/slots.py`).
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TypeVar

from common.contracts.limits import (
    MAX_DISCOVERY_DRIFT,
    MAX_DISCOVERY_ENTRY_AGE_S,
    MAX_DISCOVERY_ENTRY_BYTES,
    MAX_INDEX_VALUE_BYTES,
)
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind, PoolIdentity

ENTRY_BYTES = 6
MAX_SLOTS = 1 << 16
MAX_GENERATION = (1 << 32) - 1
DISCOVERY_PREFIX = "quire:discovery:worker:"
DISCOVERY_WORKERS_KEY = "quire:discovery:workers"

OWNER_FIELDS = ("worker_id", "incarnation", "address", "generation")

_OWNER_KEYS = tuple(name.encode() for name in OWNER_FIELDS)
_ENTRY = struct.Struct("<HI")
_PartsT = TypeVar("_PartsT", KvGeometry, KvGroup, PoolIdentity)
# Parts of a geometry that stand in entries where they say something: routers that do not know them read all others.
_NEW_PARTS = ("values_in_keys", "shapes")


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The worker that a slot stands for, and the generation whose entries count."""

    worker_id: str
    incarnation: str
    address: str
    generation: int


@dataclass(frozen=True, slots=True)
class DiscoveredWorker:
    """A worker that is attached to a manager: its address and the identity that it serves.

    `written` is when the manager wrote that, in seconds since 1970 by its clock.
    """

    worker_id: str
    address: str
    incarnation: str
    identity: PoolIdentity
    written: int = field(default=0, compare=False)


def prefix_key_root(namespace: str) -> bytes:
    """Return the beginning of the keys of all block entries; the 16-byte hash follows."""
    return f"{namespace}:p:".encode()


def slot_key(namespace: str, slot: int) -> str:
    return f"{namespace}:w:{slot}"


def liveness_key(namespace: str, slot: int) -> str:
    """Return the key that exists while a slot's worker is attached to a manager."""
    return f"{namespace}:l:{slot}"


def epoch_key(namespace: str) -> str:
    """Return the key that counts the epochs of a namespace; no two managers hold the same one, of whatever group."""
    return f"{namespace}:epoch"


def fence_key(namespace: str, group: str = "") -> str:
    """Return the key that holds the epoch of the only manager of a group that may write; "": of those in no group."""
    return f"{namespace}:fence:{group}" if group else f"{namespace}:fence"


def pins_key(namespace: str, group: str = "") -> str:
    """Return the key of the prefixes that operators pin at the workers of a group; "": of those in no group."""
    return f"{namespace}:pins:{group}" if group else f"{namespace}:pins"


def term_key(namespace: str, group: str) -> str:
    """Return the key that holds the highest term of this group in which a manager took an epoch.

    Each group counts its own terms, so two groups have nothing to compare.
    """
    return f"{namespace}:term:{group}"


def group_keys(group: str) -> tuple[str, str]:
    """Return the keys of a group of managers: its lease, and the counter of terms."""
    tag = f"{{quire:managers:{group}}}"
    return f"{tag}:lease", f"{tag}:term"


def discovery_key(worker_id: str) -> str:
    return DISCOVERY_PREFIX + worker_id


def pack_entry(slot: int, generation: int) -> bytes:
    """Return the 6 bytes of an entry: this slot holds the block, as of this generation."""
    return _ENTRY.pack(slot, generation)


def unpack_entries(value: bytes) -> list[tuple[int, int]]:
    """Return (slot, generation) of each entry; an incomplete entry at the end is ignored, and so is an excess."""
    whole = min(len(value) - len(value) % ENTRY_BYTES, MAX_INDEX_VALUE_BYTES)
    return list(_ENTRY.iter_unpack(value[:whole]))


def owner_from_fields(fields: Mapping[bytes, bytes]) -> SlotOwner | None:
    """Return the owner in a slot's hash as redis-py returns it; None when a field is missing or malformed."""
    try:
        worker_id, incarnation, address, generation = (fields[name].decode() for name in _OWNER_KEYS)
        number = int(generation)
        return SlotOwner(worker_id, incarnation, address, number) if 0 <= number <= MAX_GENERATION else None
    except (KeyError, ValueError):
        return None


def owner_from_values(values: Sequence[bytes | None]) -> SlotOwner | None:
    """Return the owner from the values of OWNER_FIELDS; None when one is missing or malformed."""
    return owner_from_fields(
        {name: value for name, value in zip(_OWNER_KEYS, values, strict=True) if value is not None}
    )


def discovered_to_value(worker: DiscoveredWorker, key: bytes | None, now: float) -> str:
    """Return the value of a discovery key, signed if the pool has a key. `now` is in seconds since 1970."""
    parts = asdict(worker) | {"written": int(now)}
    geometry = parts["identity"]["kv_geometry"]
    for name in _NEW_PARTS:
        if not geometry[name]:
            del geometry[name]
    body = json.dumps(parts)
    return f"{_signature(key, worker.worker_id, body.encode())} {body}"


@dataclass(frozen=True, slots=True)
class KnownEntry:
    """The entry of a key that counted last, written at `last`.

    At `read`, in seconds of the monotonic clock, one that was written at `written` was fresh.
    """

    last: int
    written: int
    read: float

    def goes_on(self, worker: DiscoveredWorker, monotonic: float) -> bool:
        """Return whether an entry is not older, and was written as much later as time has passed here.

        Whoever can write Redis may have recorded entries: released slowly, they would count long after their time.
        """
        passed, claimed = monotonic - self.read, worker.written - self.written
        most = MAX_DISCOVERY_ENTRY_AGE_S + MAX_DISCOVERY_DRIFT * passed
        return worker.written >= self.last and abs(claimed - passed) <= most

    def after(self, worker: DiscoveredWorker) -> KnownEntry:
        """Return this with an entry that goes on with it, although the clocks differ."""
        return replace(self, last=worker.written)


def discovered_from_value(
    value: bytes,
    worker_id: str,
    key: bytes | None,
    now: float,
    known: KnownEntry | None = None,
    monotonic: float = 0.0,
) -> DiscoveredWorker:
    """Return the worker in the value of a discovery key. Raises ValueError with what is wrong with it.

    With the pool's key, an entry must be signed with it and must not be old: who can write Redis, but has no key, could
    else give another address, or bring back that of a worker that is gone. One that goes on with the `known`
    entry of the same key, at `monotonic` seconds here, counts although the clocks have drifted apart or were set.
    """
    if len(value) > MAX_DISCOVERY_ENTRY_BYTES:
        raise ValueError(f"it has more than {MAX_DISCOVERY_ENTRY_BYTES} bytes")
    signature, _, body = value.partition(b" ")
    if key is not None and not hmac.compare_digest(signature, _signature(key, worker_id, body).encode()):
        raise ValueError("it is not signed with the pool's key")
    worker = _parsed(body)
    if worker.worker_id != worker_id:
        raise ValueError("it names another worker than its key")
    if key is None or is_fresh(worker, now) or (known is not None and known.goes_on(worker, monotonic)):
        return worker
    what = f"its date is {worker.written - now:+.0f} s off this router's clock"
    most = f"at most {MAX_DISCOVERY_ENTRY_AGE_S} s count"
    raise ValueError(f"{what}; {most}: compare the clocks of manager and router, and set the wrong one")


def is_fresh(worker: DiscoveredWorker, now: float) -> bool:
    """Return whether an entry was written lately, as far as the clocks of its writer and its reader agree."""
    return abs(now - worker.written) <= MAX_DISCOVERY_ENTRY_AGE_S


def _signature(key: bytes | None, worker_id: str, body: bytes) -> str:
    if key is None:
        return "-"
    return hmac.digest(key, b"quire-discovery-v1\0" + worker_id.encode() + b"\0" + body, "sha256").hex()


def _parsed(body: bytes) -> DiscoveredWorker:
    try:
        parts = json.loads(body)
        identity = dict(parts["identity"])
        geometry = dict(identity["kv_geometry"])
        geometry["groups"] = tuple(_group(**each) for each in geometry.get("groups", ()))
        identity["kv_geometry"] = _checked(KvGeometry(**geometry))
        worker_id, address, incarnation = (str(parts[name]) for name in ("worker_id", "address", "incarnation"))
        checked = _checked(PoolIdentity(**identity))
        return DiscoveredWorker(worker_id, address, incarnation, checked, int(parts["written"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError("it is malformed, or another version wrote it") from None


def _group(kind: str, span: int, pages: int, layers: list[int]) -> KvGroup:
    if any(type(layer) is not int for layer in layers):
        raise TypeError("layers")
    return _checked(KvGroup(KvGroupKind(kind), span, pages, tuple(layers)))


def _checked(parts: _PartsT) -> _PartsT:
    """Raise TypeError unless each part of a dataclass has the type that is declared; lists in JSON would nest."""
    for each in fields(parts):
        if type(getattr(parts, each.name)).__name__ != str(each.type).partition("[")[0]:
            raise TypeError(each.name)
    return parts
