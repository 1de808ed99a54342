"""The attention kernel against plain float64 loops: every option, shape and precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.contracts.errors import Unsupported
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.torch_backend import attend_packed
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.attention.triton_tuning import Chip
from gpuworker.attention.whole_prompts import WholePrompts
from gpuworker.kernels.triton_cache import write_kv
from tests.suites.triton_interpreted.attention_cases import (
    DECODED_FP8,
    MIXED,
    NATIVE_FP8,
    OPTIONS,
    PLAIN,
    attend,
    check,
    small,
)
from tests.support.gpuworker.attention_reference import Case, random_step, reference


@pytest.mark.parametrize("option", OPTIONS)
def test_mixed_rows_attend_as_the_formula_says(option: str) -> None:
    check(Case(MIXED), [OPTIONS[option]])


@pytest.mark.parametrize("option", ["plain", "window20", "all"])
def test_float16(option: str) -> None:
    check(Case(MIXED), [OPTIONS[option]], "float16", torch.float16)


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize(
    ("cache_dtype", "chip"), [("int8", NATIVE_FP8), ("fp8", NATIVE_FP8), ("fp8", DECODED_FP8)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantised_caches_are_read_by_their_scales(
    cache_dtype: str, chip: Chip, dtype: torch.dtype, option: str
) -> None:
    check(Case(MIXED), [OPTIONS[option]], cache_dtype, dtype, chip=chip)


@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_scales_of_any_size_keep_the_precision_of_float16(cache_dtype: str, magnitude: float) -> None:
    """Weights times scales of V of some 1e-5 would be subnormal in float16."""
    check(Case(MIXED), [PLAIN], cache_dtype, torch.float16, magnitude=magnitude)


@pytest.mark.parametrize("cache_dtype", ["float16", "float32"])
def test_the_cache_may_have_another_type_than_the_model(cache_dtype: str) -> None:
    other = torch.float32 if cache_dtype == "float16" else torch.float16
    check(Case(MIXED), [PLAIN], cache_dtype, other)


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 128, 256])
def test_any_block_size_on_one_size_of_tile(block_size: int) -> None:
    check(Case(MIXED, block_size), [OPTIONS["all"]])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (14, 2), (8, 1), (20, 1)])
def test_heads_share_their_kv_head(heads: int, kv_heads: int) -> None:
    check(Case(MIXED, 4, heads, kv_heads))


@pytest.mark.parametrize(("dim_k", "dim_v"), [(24, 12), (12, 24), (80, 80), (16, 64)])
def test_head_sizes_need_be_no_powers_of_two_and_may_differ(dim_k: int, dim_v: int) -> None:
    check(Case(MIXED, head_dim_k=dim_k, head_dim_v=dim_v))


@pytest.mark.parametrize("cache_dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize(("heads", "dim_k", "dim_v"), [(4, 24, 16), (20, 24, 12), (3, 19, 9)])
def test_values_may_be_a_prefix_of_keys(heads: int, dim_k: int, dim_v: int, cache_dtype: str) -> None:
    case = Case(MIXED, 4, heads, 1, dim_k, dim_v, values_in_keys=True)
    check(case, [OPTIONS["plain"], OPTIONS["window5"]], cache_dtype)


def test_a_layer_may_attend_on_what_another_one_wrote() -> None:
    step = random_step(Case(MIXED))
    attention = TritonAttention(step.cache, tuned=small(2))
    attend(step, attention, replace(PLAIN, layer=0))
    before = [pool.clone() for pool in step.cache.pools]
    other, unread = LayerAttention(layer=7, scale=0.2, window=9, source=0), torch.full_like(step.key, torch.nan)
    out = attention.write_and_attend(other, step.query, unread, unread)
    np.testing.assert_allclose(out.numpy(), reference(step, replace(other, layer=0)), atol=2e-5)
    assert all(torch.equal(pool, was) for pool, was in zip(step.cache.pools, before, strict=True))


def test_whole_prompts_attend_on_every_head_and_leave_their_latents() -> None:
    case = Case(((7, 1), (5, 6), (0, 9), (0, 4)), 4, 6, 1, 24, 16, values_in_keys=True)
    step, latents = random_step(case), replace(PLAIN, values_in_keys=True)
    attention = WholePrompts(TritonAttention(step.cache, tuned=small(6)), step.cache, TritonAttention)
    attention.begin(step.metadata)
    cut = attention.first_whole(latents, torch.float32)
    assert cut == 7
    out = attention.write_and_attend(latents, step.query[:cut], step.key, step.value)
    np.testing.assert_allclose(out.numpy(), reference(step, latents)[:cut], atol=2e-5)
    heads = [torch.randn((13, 6, size), generator=torch.Generator().manual_seed(size)) for size in (40, 40, 32)]
    found = attention.attend_whole(latents, *heads)
    for row in (slice(0, 9), slice(9, 13)):
        expected = attend_packed(latents, *(each[row] for each in heads))
        torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=0)


def test_programs_share_the_many_heads_of_wide_latents() -> None:
    """40 query heads of 288 numbers: ten a program, as on every chip."""
    step = random_step(Case(((37, 1), (9, 6)), 16, 40, 1, 288, 256, values_in_keys=True))
    attention = TritonAttention(step.cache, chip=Chip(90, 2, 227 << 10))
    np.testing.assert_allclose(attend(step, attention, PLAIN).numpy(), reference(step, PLAIN), atol=2e-5)


def test_tiles_wider_than_what_is_left() -> None:
    check(Case(MIXED, 16), list(OPTIONS.values()), tuned=small(2, 64))


@pytest.mark.parametrize("items", [1, 40])
def test_the_finer_the_cut_the_same_the_result(items: int) -> None:
    rows = ((100, 1), (2, 1), (177, 1), (40, 9), (150, 3))
    check(Case(rows, 16), [OPTIONS["plain"], OPTIONS["window20"], OPTIONS["all"]], tuned=small(2, items=items))


def test_more_parts_than_the_merge_reads_at_once() -> None:
    check(Case(((299, 1),), 32), tuned=small(2, items=100))


def test_the_tiles_that_a_chip_gets() -> None:
    step = random_step(Case(((150, 1), (20, 30), (0, 40)), 16))
    for capability in (80, 90, 100):
        attention = TritonAttention(step.cache, chip=Chip(capability, 108, 163 << 10))
        np.testing.assert_allclose(attend(step, attention, PLAIN).numpy(), reference(step, PLAIN), atol=2e-5)


def test_layers_with_other_heads_plan_again() -> None:
    few, many = random_step(Case(MIXED)), random_step(Case(MIXED, num_heads=8))
    attention = TritonAttention(few.cache)
    attention.begin(few.metadata)
    for step in (few, many, few):
        # Both steps start from the same past; the layer itself writes the differences.
        out = attention.write_and_attend(PLAIN, step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, PLAIN), atol=2e-5)


def test_queries_of_any_strides() -> None:
    step = random_step(Case(MIXED))
    attention = TritonAttention(step.cache, tuned=small(2))
    attention.begin(step.metadata)
    wide = [torch.cat((t, t), dim=-1)[..., : t.shape[-1]] for t in (step.query, step.key)]
    apply_rope = step.value.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    out = attention.write_and_attend(PLAIN, wide[0], wide[1], apply_rope)
    np.testing.assert_allclose(out.numpy(), reference(step, PLAIN), atol=2e-5)


def test_a_row_reads_what_another_row_of_the_step_writes() -> None:
    """Two rows on the same blocks: the second starts where the first one's positions end, in the same step."""
    step = random_step(Case(((0, 8), (8, 4))))
    shared = step.metadata.block_table[1]
    step.metadata.block_table[0] = shared
    step.metadata.slot_mapping[:8] = shared[np.arange(8) // 4] * 4 + np.arange(8) % 4
    out = attend(step, TritonAttention(step.cache, tuned=small(2)), PLAIN)
    whole = replace(step, metadata=random_step(Case(((0, 12),))).metadata)
    expected = attend(whole, TritonAttention(whole.cache, tuned=small(2)), PLAIN)
    torch.testing.assert_close(out[8:], expected[8:])


@pytest.mark.parametrize("option", ["plain", "window5"])
def test_what_a_masked_slot_holds_weighs_nothing(option: str) -> None:
    """One sequence writes infinities; its block then goes to another, whose tokens stop short of them."""
    step = random_step(Case(((0, 4),)))
    infinite = torch.full_like(step.value, torch.inf)
    write_kv(step.cache, OPTIONS[option].layer, torch.from_numpy(step.metadata.slot_mapping), infinite, infinite)
    fresh = random_step(Case(((0, 2),)))
    fresh.metadata.block_table[:] = step.metadata.block_table
    fresh.metadata.slot_mapping[:] = step.metadata.slot_mapping[:2]
    out = attend(replace(fresh, cache=step.cache), TritonAttention(step.cache, tuned=small(2)), OPTIONS[option])
    np.testing.assert_allclose(out.numpy(), reference(fresh, OPTIONS[option]), atol=2e-5)


def test_a_scale_that_is_not_positive_is_refused() -> None:
    step = random_step(Case(((0, 1),)))
    with pytest.raises(Unsupported, match=r"layer 0 scales by -1\.0"):
        attend(step, TritonAttention(step.cache), LayerAttention(layer=0, scale=-1.0))
