"""Names and packing of the data that the KV manager writes to Redis and the router reads. Standard library only.

    {ns}:p:<16-byte hash>          string: an entry a worker, little-endian u16 slot and u32 generation; has a TTL
    {ns}:w:<slot>                  hash: worker_id, incarnation (hex), address, generation; no TTL
    {ns}:l:<slot>                  liveness of the slot's worker; has a TTL, renewed while the worker is attached
    {ns}:epoch, {ns}:fence         counter of managers, and the epoch of the one that may write
    quire:discovery:workers        set of all worker ids that ever attached: readers need not scan
    quire:discovery:worker:<id>    JSON (`DiscoveredWorker`); has a TTL, renewed while attached

`ns` is `PoolIdentity.namespace`, a hash tag: all keys of an index lie in one cluster slot. An entry counts only if its
generation is that in `{ns}:w:<slot>`. The manager draws a new generation whenever it rebuilds or clears.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from common.types import KvGeometry, PoolIdentity

ENTRY_BYTES = 6
MAX_SLOTS = 1 << 16
DISCOVERY_PREFIX = "quire:discovery:worker:"
DISCOVERY_WORKERS_KEY = "quire:discovery:workers"

_ENTRY = struct.Struct("<HI")


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The worker that a slot stands for, and the generation whose entries count."""

    worker_id: str
    incarnation: str
    address: str
    generation: int


@dataclass(frozen=True, slots=True)
class DiscoveredWorker:
    """A worker that is attached to a manager: its address and the identity that it serves."""

    worker_id: str
    address: str
    incarnation: str
    identity: PoolIdentity


def prefix_key_root(namespace: str) -> bytes:
    """Return the beginning of the keys of all block entries; the 16-byte hash follows."""
    return f"{namespace}:p:".encode()


def slot_key(namespace: str, slot: int) -> str:
    return f"{namespace}:w:{slot}"


def liveness_key(namespace: str, slot: int) -> str:
    """Return the key that exists while a slot's worker is attached to a manager."""
    return f"{namespace}:l:{slot}"


def epoch_key(namespace: str) -> str:
    """Return the key that counts managers of a namespace."""
    return f"{namespace}:epoch"


def fence_key(namespace: str) -> str:
    """Return the key that holds the epoch of the only manager that may write."""
    return f"{namespace}:fence"


def discovery_key(worker_id: str) -> str:
    return DISCOVERY_PREFIX + worker_id


def pack_entry(slot: int, generation: int) -> bytes:
    """Return the 6 bytes of an entry: this slot holds the block, as of this generation."""
    return _ENTRY.pack(slot, generation)


def unpack_entries(value: bytes) -> list[tuple[int, int]]:
    """Return (slot, generation) of each entry; bytes that are no whole entry at the end are ignored."""
    whole = len(value) - len(value) % ENTRY_BYTES
    return [(slot, generation) for slot, generation in _ENTRY.iter_unpack(value[:whole])]


def owner_from_fields(fields: Mapping[bytes, bytes]) -> SlotOwner | None:
    """Return the owner in a slot's hash as redis-py returns it; None when a field is missing or malformed."""
    try:
        worker_id, incarnation, address, generation = (
            fields[name].decode() for name in (b"worker_id", b"incarnation", b"address", b"generation")
        )
        return SlotOwner(worker_id, incarnation, address, int(generation))
    except (KeyError, ValueError):
        return None


def discovered_to_json(worker: DiscoveredWorker) -> str:
    return json.dumps(asdict(worker))


def discovered_from_json(value: bytes | str) -> DiscoveredWorker | None:
    """Return the worker in a discovery key's value; None when it is malformed (another version wrote it)."""
    try:
        parts = json.loads(value)
        identity = dict(parts["identity"])
        identity["kv_geometry"] = KvGeometry(**identity["kv_geometry"])
        return DiscoveredWorker(
            str(parts["worker_id"]), str(parts["address"]), str(parts["incarnation"]), PoolIdentity(**identity)
        )
    except (KeyError, TypeError, ValueError):
        return None
