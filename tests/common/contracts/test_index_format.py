"""Names and packing of the prefix index and of discovery."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts import index_format
from common.contracts.index_format import DiscoveredWorker, SlotOwner
from common.contracts.types import KvGeometry, PoolIdentity
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


KEY, NOW = b"k" * 32, 1_700_000_000.0


def worker_of(identity: PoolIdentity = IDENTITY) -> DiscoveredWorker:
    return DiscoveredWorker("worker-0", "127.0.0.1:50053", "ab" * 16, identity)


def read(value: str | bytes, key: bytes | None = KEY, name: str = "worker-0", now: float = NOW) -> DiscoveredWorker:
    return index_format.discovered_from_value(value.encode() if isinstance(value, str) else value, name, key, now)


@given(strategies.identities, st.none() | st.binary(min_size=16, max_size=64))
def test_discovered_worker_survives_redis(identity: PoolIdentity, key: bytes | None) -> None:
    worker = worker_of(identity)
    assert read(index_format.discovered_to_value(worker, key, NOW), key) == worker


@pytest.mark.parametrize(("in_keys", "shapes"), [(False, ""), (True, ""), (False, "a=2x8+8 b=1x8+8 ab")])
def test_only_a_worker_of_latents_or_of_several_shapes_says_so(in_keys: bool, shapes: str) -> None:
    """A router of an older version reads the entries of all other workers."""
    geometry = replace(IDENTITY.kv_geometry, values_in_keys=in_keys, shapes=shapes)
    identity = replace(IDENTITY, kv_geometry=geometry)
    value = index_format.discovered_to_value(worker_of(identity), None, NOW)
    assert read(value, None).identity == identity
    assert ("values_in_keys" in value, "shapes" in value) == (in_keys, bool(shapes))


def test_value_of_another_version_is_malformed() -> None:
    wrong_type = asdict(worker_of()) | {"written": 0, "identity": {**asdict(IDENTITY), "block_size": [16]}}
    endless = json.dumps(asdict(worker_of()) | {"written": float("inf")})
    for body in ("no json", "[]", "{}", json.dumps(wrong_type), endless, "[" * 4000, "\ud800"):
        with pytest.raises(ValueError, match="malformed"):
            read(b"- " + body.encode(errors="surrogatepass"), key=None)


def test_value_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(ValueError, match="more than 8192 bytes"):
        read(b"- " + b" " * 8192, key=None)


def test_value_without_the_pools_signature_does_not_count() -> None:
    value = index_format.discovered_to_value(worker_of(), KEY, NOW)
    unsigned = index_format.discovered_to_value(worker_of(), None, NOW)
    for forged in (unsigned, value.replace("50053", "50054"), value.upper(), "", " ", value.partition(" ")[2]):
        with pytest.raises(ValueError, match="not signed with the pool's key"):
            read(forged)
    with pytest.raises(ValueError, match="not signed with the pool's key"):
        read(value, b"another key of a pool")
    with pytest.raises(ValueError, match="not signed with the pool's key"):
        read(value, name="worker-1")
    assert read(value) == worker_of()


@pytest.mark.parametrize("seconds", [301, -301])
def test_old_value_does_not_count_again(seconds: int) -> None:
    value = index_format.discovered_to_value(worker_of(), KEY, NOW)
    with pytest.raises(ValueError, match="compare the clocks"):
        read(value, now=NOW + seconds)


def test_value_under_another_workers_name_does_not_count() -> None:
    with pytest.raises(ValueError, match="names another worker"):
        read(index_format.discovered_to_value(worker_of(), None, NOW), None, "worker-1")


@pytest.mark.parametrize("generation", [b"-1", b"4294967296", b"9" * 5000])
def test_generation_outside_32_bits_is_no_owner(generation: bytes) -> None:
    values = [b"w", b"", b"", generation]
    assert index_format.owner_from_values(values) is None
    assert index_format.owner_from_values([*values[:3], b"4294967295"]) == SlotOwner("w", "", "", 2**32 - 1)


def test_value_of_a_block_counts_up_to_a_bound() -> None:
    assert len(index_format.unpack_entries(bytes(1 << 20))) == 1024
