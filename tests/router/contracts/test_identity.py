"""The router's view of its pool, and what it takes over from the first worker."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.types import KvGeometry, PoolIdentity
from router.contracts.identity import UNKNOWN_GEOMETRY, adopt, differences, is_complete

FULL = PoolIdentity("model", "tokenizer", 16, KvGeometry(2, 1, 8, 8, "float32"))
PARTIAL = PoolIdentity("", "tokenizer", 16, UNKNOWN_GEOMETRY)


def test_unknown_parts_are_adopted() -> None:
    assert adopt(PARTIAL, FULL) == FULL


def test_known_parts_are_kept() -> None:
    assert adopt(replace(PARTIAL, block_size=32), FULL) == replace(FULL, block_size=32)


def test_only_a_whole_identity_is_complete() -> None:
    assert is_complete(FULL)
    assert not is_complete(PARTIAL)
    assert not is_complete(replace(FULL, kv_geometry=UNKNOWN_GEOMETRY))


def test_pools_that_embed_share_no_keys_with_others() -> None:
    known = replace(FULL, pooling="last, normalised")
    assert len({each.namespace for each in (FULL, known, replace(FULL, pooling="mean"))}) == 3
    assert is_complete(known)
    assert not is_complete(replace(FULL, pooling=""))
    assert adopt(replace(FULL, pooling=""), known) == known


def test_a_pool_of_latents_has_keys_of_its_own_and_all_others_keep_theirs() -> None:
    assert FULL.namespace == "{quire:model:0bbd9bc4e54f3ed9:16}"
    latents = replace(FULL, kv_geometry=replace(FULL.kv_geometry, values_in_keys=True))
    mixed = replace(FULL, kv_geometry=replace(FULL.kv_geometry, shapes="a=1x8+8 b=1x4+4 ab"))
    assert len({each.namespace for each in (FULL, latents, mixed)}) == 3
    assert is_complete(latents)


def test_an_unknown_part_is_no_difference() -> None:
    assert differences(PARTIAL, FULL) == ()


def test_a_difference_has_both_values_and_the_flag() -> None:
    (found,) = differences(PARTIAL, replace(FULL, block_size=32))
    assert (found.field, found.ours, found.theirs, found.flag) == ("block_size", "16", "32", "--block-size")
