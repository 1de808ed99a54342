"""The layout of blocks whose layers differ: one line says it, and pools follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGeometry
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import IndexKey, LayerShape, Pool, geometry_of, numbers_a_layer, pools_of, with_groups

NARROW, WIDE, LATENT = LayerShape(8, 256, 256), LayerShape(2, 512, 512), LayerShape(1, 576, 512, values_in_keys=True)
INDEX = IndexKey(128, "bfloat16")
MIXED = {0: NARROW, 1: NARROW, 2: WIDE, 3: NARROW, 5: LATENT}


def test_layers_of_one_shape_need_no_line() -> None:
    geometry = geometry_of({0: LATENT, 1: LATENT}, "bfloat16", 7)
    assert geometry == KvGeometry(2, 1, 576, 512, "bfloat16", 7, values_in_keys=True)
    assert pools_of(geometry) == (Pool(geometry, (0, 1)),)


def test_each_shape_has_a_pool_of_its_layers() -> None:
    geometry = geometry_of(MIXED, "bfloat16", 0)
    assert geometry.shapes == "a=8x256+256 b=2x512+512 c=1x576/512 aaba-c"
    assert geometry.num_layers == 5
    narrow, wide, latent = pools_of(geometry)
    assert narrow == Pool(KvGeometry(3, 8, 256, 256, "bfloat16"), (0, 1, 3))
    assert wide == Pool(KvGeometry(1, 2, 512, 512, "bfloat16"), (2,))
    assert latent == Pool(KvGeometry(1, 1, 576, 512, "bfloat16", values_in_keys=True), (5,))


def test_without_a_layer_that_attends_there_is_no_pool() -> None:
    geometry = geometry_of({}, "int8", 0)
    assert geometry == KvGeometry(0, 0, 0, 0, "int8")
    assert (pools_of(geometry), bytes_per_block(geometry, 16), numbers_a_layer(geometry)) == ((), 0, 0)
    assert with_groups(geometry, {}, {}, 16) is geometry
    cache = KvCache(geometry, 3, 4, torch.device("cpu"))
    assert (cache.pools, cache.parts, cache.num_blocks) == ([], (), 3)
    cache.copy_blocks([Copy(BlockId(0), BlockId(2), 4)])


def test_a_gap_is_a_layer_without_its_own() -> None:
    geometry = geometry_of({0: LATENT, 2: LATENT}, "float32", 0)
    assert geometry == KvGeometry(2, 1, 576, 512, "float32", values_in_keys=True, shapes="a=1x576/512 a-a")
    (pool,) = pools_of(geometry)
    assert pool == Pool(replace(geometry, shapes=""), (0, 2))


def test_layers_with_index_keys_are_other_than_those_without() -> None:
    geometry = geometry_of({0: replace(LATENT, index=INDEX), 1: LATENT}, "int8", 0)
    assert geometry.shapes == "a=1x576/512,128:bfloat16 b=1x576/512 ab"
    plain = KvGeometry(1, 1, 576, 512, "int8", values_in_keys=True)
    assert pools_of(geometry) == (Pool(plain, (0,), INDEX), Pool(plain, (1,)))
    assert geometry_of({0: replace(LATENT, index=INDEX)}, "int8", 0).shapes == "a=1x576/512,128:bfloat16 a"


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", 2 * 576), ("int8", 576 + 4), ("fp8", 576 + 4)])
def test_a_block_has_the_bytes_of_index_keys_in_their_own_type(dtype: str, kept: int) -> None:
    geometry = geometry_of({0: replace(LATENT, index=INDEX), 1: LATENT}, dtype, 0)
    assert bytes_per_block(geometry, 4) == 4 * (2 * kept + 2 * 128)
    cache = KvCache(geometry, 3, 4, torch.device("cpu"))
    assert sum(pool.nbytes for pool in cache.pools) == 3 * bytes_per_block(geometry, 4)


@pytest.mark.parametrize(
    ("dtype", "size", "scales"), [("float32", 4, 0), ("bfloat16", 2, 0), ("int8", 1, 4), ("fp8", 1, 4)]
)
def test_a_block_has_the_bytes_of_all_pools(dtype: str, size: int, scales: int) -> None:
    geometry = geometry_of(MIXED, dtype, 0)
    numbers = 3 * 8 * 512 + 2 * 1024 + 576
    heads = 2 * 3 * 8 + 2 * 2 + 1  # each with a scale
    assert bytes_per_block(geometry, 4) == 4 * (numbers * size + heads * scales)
    cache = KvCache(geometry, 3, 4, torch.device("cpu"))
    assert sum(pool.nbytes for pool in cache.pools) == 3 * bytes_per_block(geometry, 4)
    assert numbers_a_layer(geometry) == 8 * 512


def test_a_copy_takes_the_block_in_every_pool() -> None:
    layers = MIXED | {5: replace(LATENT, index=INDEX)}
    cache = KvCache(geometry_of(layers, "int8", 0), 3, 4, torch.device("cpu"))
    assert len(cache.pools) == 4 + 4 + 3
    for number, pool in enumerate(cache.pools):
        pool[:, 2] = number + 1
    cache.copy_blocks([Copy(BlockId(2), BlockId(0), 4)])
    for number, pool in enumerate(cache.pools):
        assert bool((pool[:, 0] == number + 1).all())
        assert not pool[:, 1].float().any()


types = st.sampled_from(["float32", "bfloat16", "float16"])
index_keys = st.none() | st.builds(IndexKey, st.integers(1, 256), types)
sizes = st.integers(1, 1024)
shapes = st.builds(LayerShape, st.integers(1, 128), sizes, sizes, st.booleans(), index_keys)


@given(st.dictionaries(st.integers(0, 60), shapes, min_size=1, max_size=50))
def test_pools_have_each_layer_once_in_its_shape(layers: dict[int, LayerShape]) -> None:
    geometry = geometry_of(layers, "bfloat16", 0)
    found: dict[int, LayerShape] = {}
    for pool in pools_of(geometry):
        kind = pool.geometry
        assert (kind.num_layers, kind.shapes, list(pool.layers)) == (len(pool.layers), "", sorted(pool.layers))
        shape = LayerShape(kind.num_kv_heads, kind.head_dim_k, kind.head_dim_v, kind.values_in_keys, pool.index)
        found |= dict.fromkeys(pool.layers, shape)
    assert found == layers


def test_layers_of_too_many_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="53 shapes of layers; expected at most 52"):
        geometry_of({n: LayerShape(1, n + 1, 8) for n in range(53)}, "float32", 0)


@pytest.mark.parametrize(
    "line",
    ["a=8x256 aaaaa", "a=8x256+256 aaaab", "a=8x256+256 aaaa", "aaaaa", "a=1x1+1 b=1x1+1 aaaaa", "a=1x1+1,8 aaaaa"],
)
def test_a_line_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"shape|does not give"):
        pools_of(replace(geometry_of(MIXED, "float32", 0), shapes=line))
