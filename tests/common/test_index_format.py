"""Names and packing of the prefix index and of discovery."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from common import index_format
from common.index_format import DiscoveredWorker, SlotOwner
from common.types import KvGeometry, PoolIdentity
from tests.support import wire_strategies as strategies

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 2, 8, 8, "float32"))


def test_all_keys_of_a_namespace_lie_in_one_cluster_slot() -> None:
    namespace = IDENTITY.namespace
    assert re.fullmatch(r"\{quire:m{16}:[0-9a-f]{16}:16\}", namespace)
    assert index_format.prefix_key_root(namespace) == namespace.encode() + b":p:"
    assert index_format.slot_key(namespace, 7) == namespace + ":w:7"
    assert index_format.liveness_key(namespace, 7) == namespace + ":l:7"
    assert index_format.epoch_key(namespace) == namespace + ":epoch"
    assert index_format.fence_key(namespace) == namespace + ":fence"


def test_entries_are_six_little_endian_bytes() -> None:
    assert index_format.pack_entry(0x0102, 0x03040506) == bytes([2, 1, 6, 5, 4, 3])


@given(st.lists(st.tuples(st.integers(0, 2**16 - 1), strategies.u32)), st.binary(max_size=5))
def test_entries_survive_packing_whatever_trails_them(entries: list[tuple[int, int]], trailing: bytes) -> None:
    packed = b"".join(index_format.pack_entry(*entry) for entry in entries)
    assert index_format.unpack_entries(packed + trailing) == entries


def test_owner_survives_redis() -> None:
    owner = SlotOwner("worker-0", "ab" * 16, "127.0.0.1:50053", 2**32 - 1)
    fields = {name.encode(): str(value).encode() for name, value in asdict(owner).items()}
    assert index_format.owner_from_fields(fields) == owner


def test_owner_with_a_missing_or_malformed_field_is_none() -> None:
    assert index_format.owner_from_fields({b"worker_id": b"w"}) is None
    fields = {b"worker_id": b"w", b"incarnation": b"", b"address": b"", b"generation": b"x"}
    assert index_format.owner_from_fields(fields) is None


@given(strategies.identities)
def test_discovered_worker_survives_json(identity: PoolIdentity) -> None:
    worker = DiscoveredWorker("worker-0", "127.0.0.1:50053", "ab" * 16, identity)
    assert index_format.discovered_from_json(index_format.discovered_to_json(worker)) == worker


def test_discovery_value_of_another_version_is_none() -> None:
    for value in (
        "no json",
        "[]",
        "{}",
        json.dumps({"worker_id": "w", "address": "", "incarnation": "", "identity": 3}),
    ):
        assert index_format.discovered_from_json(value) is None
