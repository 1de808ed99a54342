"""The pools: their size in bytes, and block copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGeometry
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.kv_cache import KvCache

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=3, head_dim_k=8, head_dim_v=4, dtype="float32")


def cache() -> KvCache:
    made = KvCache(GEOMETRY, 4, 16, torch.device("cpu"))
    for pool in (made.keys, made.values):
        pool.copy_(torch.arange(4).view(1, 4, 1, 1, 1).expand_as(pool))
    return made


def copy(src: int, dst: int) -> Copy:
    return Copy(BlockId(src), BlockId(dst), 0)


def content(made: KvCache) -> list[float]:
    assert all(bool((pool[:, b] == pool[0, b, 0, 0, 0]).all()) for pool in (made.keys, made.values) for b in range(4))
    return made.keys[0, :, 0, 0, 0].tolist()


def test_a_block_counts_both_pools_in_all_layers() -> None:
    assert bytes_per_block(GEOMETRY, 16) == 2 * 3 * 16 * (8 + 4) * 4
    made = cache()
    assert 4 * bytes_per_block(GEOMETRY, 16) == made.keys.nbytes + made.values.nbytes


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantised_block_counts_its_scales(dtype: str) -> None:
    geometry = replace(GEOMETRY, dtype=dtype)
    made = KvCache(geometry, 4, 16, torch.device("cpu"))
    assert made.key_scales is not None
    assert made.value_scales is not None
    pools = (made.keys, made.values, made.key_scales, made.value_scales)
    assert bytes_per_block(geometry, 16) == 2 * 3 * 16 * (8 + 4 + 2 * 4)
    assert 4 * bytes_per_block(geometry, 16) == sum(pool.nbytes for pool in pools)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_values_in_keys_take_no_bytes(dtype: str) -> None:
    geometry = replace(GEOMETRY, dtype=dtype, values_in_keys=True)
    made = KvCache(geometry, 4, 16, torch.device("cpu"))
    assert bytes_per_block(geometry, 16) == 2 * 3 * 16 * (8 * 4 if dtype == "float32" else 8 + 4)
    assert 4 * bytes_per_block(geometry, 16) == sum(pool.nbytes for pool in made.pools)
    made.keys.copy_(torch.arange(8).expand_as(made.keys))
    assert made.values[1, 3, 2, 15].tolist() == [0, 1, 2, 3]
    assert made.value_scales is made.key_scales


def test_a_copy_of_values_in_keys_is_one_of_keys() -> None:
    made = KvCache(replace(GEOMETRY, dtype="int8", values_in_keys=True), 4, 16, torch.device("cpu"))
    assert made.key_scales is not None
    made.keys[:, 3], made.key_scales[:, 3] = 7, 0.5
    made.copy_blocks([copy(3, 1)])
    assert bool((made.values[:, 1] == 7).all() and (made.key_scales[:, 1] == 0.5).all())
    assert not made.keys[:, (0, 2)].any()


def test_a_token_of_deepseek_v3_takes_576_numbers_a_layer() -> None:
    geometry = KvGeometry(61, 1, 576, 512, "bfloat16", values_in_keys=True)
    assert bytes_per_block(geometry, 1) == 576 * 61 * 2


def test_a_copy_takes_the_scales_along() -> None:
    made = KvCache(replace(GEOMETRY, dtype="int8"), 4, 16, torch.device("cpu"))
    assert made.key_scales is not None
    assert made.value_scales is not None
    made.key_scales[:, 2], made.value_scales[:, 2] = 0.5, 0.25
    made.copy_blocks([copy(2, 0)])
    assert bool((made.key_scales[:, 0] == 0.5).all() and (made.value_scales[:, 0] == 0.25).all())


def test_pools_are_head_major() -> None:
    made = cache()
    assert made.keys.shape == (2, 4, 3, 16, 8)
    assert made.values.shape == (2, 4, 3, 16, 4)


def test_a_copy_takes_the_whole_block_in_every_layer() -> None:
    made = cache()
    made.copy_blocks([copy(3, 1)])
    assert content(made) == [0, 3, 2, 3]


def test_copies_happen_in_list_order() -> None:
    made = cache()
    made.copy_blocks([copy(0, 1), copy(1, 2), copy(3, 0)])
    assert content(made) == [3, 0, 0, 3]
