"""The work between the fused qkv product of a Llama-like layer and its attention, in one Triton kernel.

The kernel splits qkv, norms queries and keys where the model does (Qwen3), applies rope, and writes K and V into the
paged cache. It reads and writes each value once, where plain tensor operations take five passes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gpuworker.kernels.triton_cache import bytes_of, largest_value, scales_of, store_head
from gpuworker.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norm of each head of q and k before rope; both weights [head_dim]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


def rope_table(inverse_frequency: torch.Tensor, max_len: int, scaling: float = 1.0) -> torch.Tensor:
    """Return [max_len, head_dim] float32: for each position the cosines, then the sines, of head_dim / 2 angles.

    inverse_frequency [head_dim / 2] and `scaling` are what transformers' rope initialisers return.
    """
    angles = torch.arange(max_len, device=inverse_frequency.device)[:, None] * inverse_frequency.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling


def rope_and_write(
    cache: KvCache,
    layer: int,
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norm: QkNorm | None = None,
) -> torch.Tensor:
    """Write K and V of a layer into the cache and return the queries, [T, num_heads, head_dim].

    qkv [T, (num_heads + 2 * kv_heads) * head_dim], rows contiguous: queries, keys, values; table as of `rope_table`;
    positions [T]; slots [T] int32, where -1 is written nowhere. Halves of a head rotate in pairs (x_i, x_{i + d/2}).
    K and V heads have one size, of the cache.
    """
    geometry = cache.geometry
    kv_heads, dim = geometry.num_kv_heads, geometry.head_dim_k
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query = qkv.new_empty((qkv.shape[0], heads, dim))
    if not len(query):
        return query
    keys, values = bytes_of(cache.keys[layer]), bytes_of(cache.values[layer])
    key_scales, value_scales = scales_of(cache, layer)
    rope_and_write_kernel[(len(query), kv_heads)](
        qkv,
        norm.query_weight if norm else qkv,
        norm.key_weight if norm else qkv,
        table,
        positions,
        slots,
        query,
        keys,
        values,
        key_scales,
        value_scales,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        norm.eps if norm else 0.0,
        BLOCK_SIZE=cache.block_size,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_TILE=triton.next_power_of_2(heads // kv_heads),
        HEAD_DIM=dim,
        HALF_TILE=triton.next_power_of_2(dim // 2),
        DIM_TILE=triton.next_power_of_2(dim),
        NORMED=norm is not None,
        QUANTISED=cache.key_scales is not None,
        LARGEST=largest_value(cache),
        num_warps=rope_warps(heads // kv_heads, dim),
    )
    return query


def rope_warps(group: int, head_dim: int) -> int:
    """Return how many warps apply rope to one group of heads: about 8 values a thread, loaded as 16 bytes."""
    return min(max(int(triton.next_power_of_2(group * head_dim)) // 256, 1), 8)


@triton.jit
def _apply_rope(first, second, cos, sin):
    """Rotate the halves of heads by the angles of their position."""
    return first * cos - second * sin, second * cos + first * sin


# The tables of a step are adjacent in memory: their alignment changes from step to step.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_and_write_kernel(
    qkv,
    query_weight,
    key_weight,
    table,
    positions,
    slots,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    qkv_stride,
    keys_block,
    keys_head,
    values_block,
    values_head,
    eps,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTISED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program handles one token's K/V head and the query heads of its group."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF_TILE)
    inside = half < HALF
    angles = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + half
    cos = tl.load(angles, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=inside, other=0.0).to(tl.float32)

    member = tl.arange(0, GROUP_TILE)[:, None]
    at = (head * GROUP + member) * HEAD_DIM + half[None, :]
    taken = (member < GROUP) & inside[None, :]
    source = qkv + token * qkv_stride
    first = tl.load(source + at, mask=taken, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, mask=taken, other=0.0).to(tl.float32)
    if NORMED:
        inverse = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)
        first *= inverse[:, None] * tl.load(query_weight + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        second *= inverse[:, None] * tl.load(query_weight + half + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    first, second = _apply_rope(first, second, cos[None, :], sin[None, :])
    into = query + token * (KV_HEADS * GROUP * HEAD_DIM) + at
    tl.store(into, first.to(query.dtype.element_ty), mask=taken)
    tl.store(into + HALF, second.to(query.dtype.element_ty), mask=taken)

    slot = tl.load(slots + token)
    written = slot >= 0
    block = (slot // BLOCK_SIZE).to(tl.int64)
    offset = slot % BLOCK_SIZE
    scale_at = (block * KV_HEADS + head) * BLOCK_SIZE + offset

    # Both halves of the key as the rows of one tile: one scale for both.
    row = tl.arange(0, 2)[:, None]
    key_at = row * HALF + half[None, :]
    other_at = (1 - row) * HALF + half[None, :]
    wide = (row < 2) & inside[None, :]
    key_source = source + (KV_HEADS * GROUP + head) * HEAD_DIM
    key = tl.load(key_source + key_at, mask=wide, other=0.0).to(tl.float32)
    other = tl.load(key_source + other_at, mask=wide, other=0.0).to(tl.float32)
    if NORMED:
        inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(key * key, axis=1), axis=0) / HEAD_DIM + eps)
        key *= inverse * tl.load(key_weight + key_at, mask=wide, other=0.0).to(tl.float32)
        other *= inverse * tl.load(key_weight + other_at, mask=wide, other=0.0).to(tl.float32)
    key = key * cos[None, :] + tl.where(row == 0, -other, other) * sin[None, :]
    base = block * keys_block + head * keys_head + offset * HEAD_DIM
    store_head(key, wide, key_at, keys, base, key_scales, scale_at, written, QUANTISED, LARGEST)

    dim = tl.arange(0, DIM_TILE)
    value_source = source + (KV_HEADS * (GROUP + 1) + head) * HEAD_DIM
    value = tl.load(value_source + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    base = block * values_block + head * values_head + offset * HEAD_DIM
    store_head(value, dim < HEAD_DIM, dim, values, base, value_scales, scale_at, written, QUANTISED, LARGEST)
