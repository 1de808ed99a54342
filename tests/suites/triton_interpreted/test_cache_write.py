"""What the kernels write into the cache: heads split and after rope, quantised values with scales, finite numbers."""

from __future__ import annotations

import pytest
import torch

from common.contracts.types import KvGeometry
from gpuworker.kernels.triton_cache import write_kv
from gpuworker.kernels.triton_rope import QkNorm, rope_and_write, rope_table
from gpuworker.memory.kv_cache import KvCache

CPU = torch.device("cpu")
KV_HEADS, DIM, BLOCK_SIZE = 2, 12, 4
SLOTS = torch.tensor([9, -1, 30, 14], dtype=torch.int32)
TOKENS, LAYER = len(SLOTS), 1


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache_of(dtype: str, dim_v: int = DIM) -> KvCache:
    return KvCache(KvGeometry(2, KV_HEADS, DIM, dim_v, dtype), 8, BLOCK_SIZE, CPU)


def at_slots(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return [len(slots), kv_heads, ...] of the layer."""
    return pool[LAYER, slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]


def held(cache: KvCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V in float64, scaled back."""
    keys, values = (at_slots(pool, slots).double() for pool in (cache.keys, cache.values))
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values
    return keys * at_slots(cache.key_scales, slots)[..., None], values * at_slots(cache.value_scales, slots)[..., None]


# Half a step of the type at the largest magnitude of a head.
ERROR = {"float32": 0.0, "float16": 2**-11, "int8": 0.5 / 127 + 1e-6, "fp8": 2**-4}


@pytest.mark.parametrize("dtype", ERROR)
def test_each_head_goes_to_its_slot_and_padding_nowhere(dtype: str) -> None:
    cache = cache_of(dtype, dim_v=10)
    key, value = draw(TOKENS, KV_HEADS, DIM), draw(KV_HEADS, TOKENS, 10, seed=1).transpose(0, 1)
    write_kv(cache, LAYER, SLOTS, key, value)
    kept = SLOTS >= 0
    for found, given in zip(held(cache, SLOTS[kept]), (key[kept], value[kept]), strict=True):
        bound = ERROR[dtype] * given.abs().amax(dim=-1, keepdim=True).double()
        assert ((found - given.double()).abs() <= bound).all()
    assert (cache.keys.float() != 0).sum() == 3 * KV_HEADS * DIM - (0 if dtype != "int8" else zeros(key[kept]))
    assert not cache.keys[1 - LAYER].float().any()


def zeros(given: torch.Tensor) -> int:
    """How many values round to zero in int8."""
    return int((given.abs() < 0.5 * given.abs().amax(dim=-1, keepdim=True) / 127).sum())


def test_int8_uses_its_whole_range() -> None:
    cache = cache_of("int8")
    key = torch.zeros((1, KV_HEADS, DIM))
    key[0, 0, :3] = torch.tensor([254.0, -254.0, 3.0])
    write_kv(cache, LAYER, SLOTS[:1], key, key)
    assert at_slots(cache.keys, SLOTS[:1])[0, 0, :4].tolist() == [127, -127, 2, 0]
    assert cache.key_scales is not None
    assert at_slots(cache.key_scales, SLOTS[:1])[0].tolist() == [2.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "fp8"])
def test_what_is_written_is_finite(dtype: str) -> None:
    cache = cache_of(dtype)
    value = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * (DIM // 4)).expand(1, KV_HEADS, DIM)
    write_kv(cache, LAYER, SLOTS[:1], value, value)
    for pool in held(cache, SLOTS[:1]):
        assert pool.isfinite().all()
        assert pool[0, 0, 0] == 0
        assert pool[0, 0, 1] > 6e4
        assert pool[0, 0, 2] < -6e4


def test_float16_keeps_what_is_beyond_it_at_its_largest() -> None:
    cache = cache_of("float16")
    value = torch.full((1, KV_HEADS, DIM), 1e6)
    write_kv(cache, LAYER, SLOTS[:1], value, -value)
    keys, values = held(cache, SLOTS[:1])
    assert (keys == 65504).all()
    assert (values == -65504).all()


def test_fp8_is_rounded_as_torch_rounds_it() -> None:
    """Every e4m3 number, what lies between two of them at either side of the middle, and the middle itself."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    given = torch.cat((exact, middle, middle * (1 - 1e-6), middle * (1 + 1e-6)))
    given = torch.cat((given, -given))[: 45 * KV_HEADS * (DIM - 1)].view(-1, KV_HEADS, DIM - 1)
    given = torch.cat((given, torch.full((len(given), KV_HEADS, 1), 448.0)), dim=-1)  # so that each scale is 1
    cache = KvCache(KvGeometry(2, KV_HEADS, DIM, DIM, "fp8"), 12, BLOCK_SIZE, CPU)
    slots = torch.arange(len(given), dtype=torch.int32)
    write_kv(cache, LAYER, slots, given, given)
    expected = given.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(at_slots(cache.keys, slots).view(torch.uint8), expected)


POSITIONS = torch.tensor([0, 0, 17, 5])
INVERSE_FREQUENCY = 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))


def apply_rope(x: torch.Tensor, norm_weight: torch.Tensor | None) -> torch.Tensor:
    """Norm heads [T, n, DIM] and apply rope to them, in float64."""
    x = x.double()
    if norm_weight is not None:
        x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
    angle = (POSITIONS[:, None] * INVERSE_FREQUENCY.double())[:, None]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dtype", "heads"), [("float32", 6), ("float16", 4), ("int8", 2), ("fp8", 6)])
def test_qkv_is_split_normed_turned_and_written(dtype: str, heads: int, normed: bool) -> None:
    cache = cache_of(dtype)
    compute = torch.float16 if dtype == "float16" else torch.float32
    qkv = draw(TOKENS, (heads + 2 * KV_HEADS) * DIM).to(compute)
    norm = QkNorm(draw(DIM, seed=2), draw(DIM, seed=3), 1e-6) if normed else None
    table = rope_table(INVERSE_FREQUENCY, 20)
    found = rope_and_write(cache, LAYER, qkv, table, POSITIONS, SLOTS, norm)
    query, key, value = qkv.view(TOKENS, -1, DIM).split((heads, KV_HEADS, KV_HEADS), dim=1)
    error = 2e-3 if compute == torch.float16 else 5e-6
    expected = apply_rope(query, norm.query_weight if norm else None)
    assert found.dtype == compute
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)
    kept = SLOTS >= 0
    for pool, given in zip(
        held(cache, SLOTS[kept]),
        (apply_rope(key, norm.key_weight if norm else None)[kept], value[kept].double()),
        strict=True,
    ):
        bound = ERROR[dtype] * given.abs().amax(dim=-1, keepdim=True) + error
        assert ((pool - given).abs() <= bound).all()
    assert not cache.values[1 - LAYER].float().any()  # where slot -1 of this layer would lie
