"""Writes K and V into the paged cache with Triton, quantised where the cache is; has helpers for other kernels.

A quantised slot of a head holds value / scale with scale = largest magnitude / largest of the type, as in
`gpuworker.memory.devices`. Written values are always finite, because a slot that is masked later is still multiplied by
0, and 0 * inf is not 0.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpuworker.memory.kv_cache import KvCache

# A head whose largest magnitude is below this is stored as zeros: the inverse of its scale would overflow.
_SMALLEST_AMAX = tl.constexpr(1e-30)


def largest_value(cache: KvCache) -> float:
    """Return the largest finite magnitude of the type of the cache's elements."""
    dtype = cache.keys.dtype
    return float(torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max)


def bytes_of(pool: torch.Tensor) -> torch.Tensor:
    """Return an fp8 pool as its bytes, which the kernels encode themselves, and any other as it is."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def scales_of(cache: KvCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one layer's scales of K and of V; where there are none, tensors that no kernel reads."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys[layer], cache.values[layer]
    return cache.key_scales[layer], cache.value_scales[layer]


def write_kv(cache: KvCache, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write key [T, kv_heads, head_dim_k] and value [T, kv_heads, head_dim_v] into slots [T]; -1 is written nowhere.

    Nor is V where it is a prefix of K.
    """
    tokens, kv_heads, head_dim_k = key.shape
    if not tokens:
        return
    key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
    keys, values = bytes_of(cache.keys[layer]), bytes_of(cache.values[layer])
    key_scales, value_scales = scales_of(cache, layer)
    write_kv_kernel[(tokens, kv_heads)](
        key,
        value,
        slots,
        keys,
        values,
        key_scales,
        value_scales,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        BLOCK_SIZE=cache.block_size,
        KV_HEADS=kv_heads,
        HEAD_DIM_K=head_dim_k,
        HEAD_DIM_V=value.shape[2],
        TILE_K=triton.next_power_of_2(head_dim_k),
        TILE_V=triton.next_power_of_2(value.shape[2]),
        QUANTISED=cache.key_scales is not None,
        WITH_VALUES=not cache.geometry.values_in_keys,
        LARGEST=largest_value(cache),
        num_warps=1,
    )


@triton.jit
def made_finite(x, LARGEST: tl.constexpr):
    """Return float32 x with 0 for NaN and ±LARGEST for larger magnitudes."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)


@triton.jit
def inverse_scale(amax, LARGEST: tl.constexpr):
    """Return the factor by which a head's values are multiplied before they are stored, 0 for a head of zeros."""
    return tl.where(amax > _SMALLEST_AMAX, LARGEST / tl.maximum(amax, _SMALLEST_AMAX), 0.0)


@triton.jit
def e4m3_bits(x):
    """Return float32 x, at most 448 in magnitude, as the bytes of fp8 e4m3, rounded to nearest even.

    By hand: chips before sm_89 have no such conversion, and that of Triton 3.7's interpreter loses carries.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of mantissa stay; the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 values are multiples of 2^-9, which is one unit in the last place of 2^14.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def stored(x, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Convert float32 values, scaled already where the cache is quantised, to the type of the pool."""
    x = made_finite(x, LARGEST)
    if dtype == tl.uint8:
        return e4m3_bits(x)
    if dtype == tl.int8:
        x = tl.floor(x + 0.5)
    return x.to(dtype)


@triton.jit
def store_head(x, inside, at, pool, base, scales, scale_at, written, QUANTISED: tl.constexpr, LARGEST: tl.constexpr):
    """Store one head of one slot, x float32 of any shape, at pool + base + at, and its scale at scales + scale_at."""
    if QUANTISED:
        x = made_finite(x, 3.0e38)
        amax = tl.max(tl.abs(x))
        tl.store(scales + scale_at, amax / LARGEST, mask=written)
        x = x * inverse_scale(amax, LARGEST)
    tl.store(pool + base + at, stored(x, pool.dtype.element_ty, LARGEST), mask=inside & written)


# The tables of a step are adjacent in memory: their alignment changes from step to step.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kv_kernel(
    key,
    value,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    key_token,
    key_head,
    value_token,
    value_head,
    keys_block,
    keys_head,
    values_block,
    values_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    QUANTISED: tl.constexpr,
    WITH_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program writes one K/V head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    written = slot >= 0
    block = (slot // BLOCK_SIZE).to(tl.int64)
    offset = slot % BLOCK_SIZE
    scale_at = (block * KV_HEADS + head) * BLOCK_SIZE + offset
    at_k = tl.arange(0, TILE_K)
    k = tl.load(key + token * key_token + head * key_head + at_k, mask=at_k < HEAD_DIM_K, other=0.0).to(tl.float32)
    base_k = block * keys_block + head * keys_head + offset * HEAD_DIM_K
    store_head(k, at_k < HEAD_DIM_K, at_k, keys, base_k, key_scales, scale_at, written, QUANTISED, LARGEST)
    if WITH_VALUES:
        at_v = tl.arange(0, TILE_V)
        v = tl.load(value + token * value_token + head * value_head + at_v, mask=at_v < HEAD_DIM_V, other=0.0)
        base_v = block * values_block + head * values_head + offset * HEAD_DIM_V
        store_head(
            v.to(tl.float32),
            at_v < HEAD_DIM_V,
            at_v,
            values,
            base_v,
            value_scales,
            scale_at,
            written,
            QUANTISED,
            LARGEST,
        )
