"""Steps in other precisions than float32, and tiles so small that tiny contexts cross them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.attention.triton_tuning import Chip, KernelShape, Tuning, power_of_two
from gpuworker.attention.work_list import Cut
from gpuworker.memory.kv_cache import KvCache
from tests.support.gpuworker.attention_reference import CPU, Case, Step, random_step, reference

MIXED = ((7, 1), (30, 1), (1, 1), (45, 1), (0, 9), (13, 6), (0, 1))
PLAIN = LayerAttention(layer=1, scale=0.3)
SINKS = torch.tensor([0.0, 1.0, -2.0, 0.3])
OPTIONS = {
    "plain": PLAIN,
    "window5": LayerAttention(layer=0, scale=0.3, window=5),
    "window20": LayerAttention(layer=1, scale=0.3, window=20),
    "chunk5": LayerAttention(layer=0, scale=0.3, chunk=5),
    "chunk12": LayerAttention(layer=1, scale=0.3, chunk=12),
    "softcap": LayerAttention(layer=1, scale=0.5, softcap=2.0),
    "sinks": LayerAttention(layer=0, scale=0.3, sinks=SINKS),
    "all": LayerAttention(layer=1, scale=0.3, window=17, softcap=1.5, sinks=SINKS),
}
# How far from float64 the result may be: rounding of the inputs is not counted, that of weights and result is.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
# fp8 as the chip reads it, and as it is decoded where the chip cannot.
NATIVE_FP8, DECODED_FP8 = (Chip(capability, 2, 227 << 10) for capability in (90, 80))


def small(group: int, tile: int = 16, items: int = 4) -> Tuning:
    """Tiles of 16 positions and 16 or 32 rows of queries; contexts are cut into chunks of 16 and more."""
    single, many = max(16, power_of_two(group)), max(32, power_of_two(group))
    return Tuning(
        KernelShape(single, tile, 4, 1),
        KernelShape(many, tile, 4, 1),
        Cut(1, tile, tile, items),
        Cut(many // group, tile, tile, items),
    )


def retyped(step: Step, cache_dtype: str, dtype: torch.dtype) -> Step:
    """Return the step with another type of cache and of q, k and v; `past`, `key` and `value` as the cache holds them.

    The kernel is to be given `step.key` and `step.value`, in `dtype`; the reference reads the returned ones.
    """
    geometry = replace(step.case.geometry, dtype=cache_dtype)
    cache = KvCache(geometry, step.cache.num_blocks, step.cache.block_size, CPU)
    in_keys = step.case.values_in_keys
    for pool, scales, given in (
        (cache.keys, cache.key_scales, step.cache.keys),
        (cache.values, cache.value_scales, step.cache.values),
    )[: 1 if in_keys else 2]:
        stored, scale = quantised(given, pool.dtype)
        pool.copy_(stored)
        if scales is not None:
            scales.copy_(scale)
    past = [(held(keys, cache.keys.dtype), held(values, cache.values.dtype)) for keys, values in step.past]
    key, value = (held(new.to(dtype), cache.keys.dtype) for new in (step.key, step.value))
    if in_keys:
        past, value = [(keys, keys[..., : values.shape[-1]]) for keys, values in past], key[..., : value.shape[-1]]
    return replace(step, cache=cache, past=past, query=step.query.to(dtype), key=key, value=value)


def quantised(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [..., d] in another type, and the scale [...] of each head."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return x.to(dtype), torch.ones(x.shape[:-1])
    largest = 127 if dtype == torch.int8 else 448
    scale = x.float().abs().amax(dim=-1) / largest
    scaled = x.float() / scale.clamp_min(1e-30)[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def held(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x as a cache of this type holds it."""
    stored, scale = quantised(x, dtype)
    return stored.double() * scale[..., None]


def attend(step: Step, attention: TritonAttention, layer: LayerAttention, given: Step | None = None) -> torch.Tensor:
    """Run one layer of a step; k and v of `given`, in the type of the queries."""
    key, value = ((given or step).key.to(step.query.dtype), (given or step).value.to(step.query.dtype))
    attention.begin(step.metadata)
    return attention.write_and_attend(layer, step.query, key, value)


def check(
    case: Case,
    layers: Sequence[LayerAttention] = (PLAIN,),
    cache_dtype: str = "float32",
    dtype: torch.dtype = torch.float32,
    tuned: Tuning | None = None,
    chip: Chip = NATIVE_FP8,
    magnitude: float = 1.0,
) -> None:
    """Compare layers of a random step with float64; `magnitude` is that of the values."""
    given = random_step(case)
    for values in (given.value, given.cache.values, *(values for _, values in given.past)):
        values.mul_(magnitude)
    step = retyped(given, cache_dtype, dtype)
    tuned = tuned or small(case.num_heads // case.num_kv_heads)
    attention = TritonAttention(step.cache, chip=chip, tuned=tuned)
    for layer in layers:
        out = attend(step, attention, layer, given)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.double().numpy(), reference(step, layer), atol=magnitude * TOLERANCE[dtype])
