"""Native attention at every level of instructions that this processor has, against plain float64 loops."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.native import library as native
from tests.support.gpuworker.attention_reference import CPU, Case, Step, in_type, random_step, reference

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")
KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
MIXED = ((7, 1), (30, 1), (1, 1), (45, 1), (0, 9), (13, 6), (0, 1))
PLAIN = LayerAttention(layer=1, scale=0.3)
ALL = LayerAttention(layer=0, scale=0.3, window=6, softcap=1.5, sinks=torch.tensor([0.0, 1.0, -2.0, 0.3]))
LAYERS = [
    PLAIN,
    LayerAttention(layer=0, scale=0.3, window=5),
    LayerAttention(layer=0, scale=0.3, chunk=13),
    LayerAttention(layer=1, scale=0.5, softcap=2.0),
    LayerAttention(layer=0, scale=0.3, sinks=torch.tensor([-1.0, 0.0, 0.5, 2.0])),
    ALL,
]
NAMES = ["plain", "window", "chunk", "softcap", "sinks", "all"]
# What a kernel rounds beyond what the cache holds: floats; or the query and the weights of the softmax to bfloat16.
ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-22, "bfloat16": 2.0**-9, "int8": 2.0**-9}


@pytest.fixture(params=native.levels_here())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return native.load(str(request.param))


def attend(library: ctypes.CDLL, step: Step, layer: LayerAttention, **options: int) -> torch.Tensor:
    attention = NativeAttention(step.cache, library=library, **options)  # type: ignore[arg-type]
    attention.begin(step.metadata)
    return attention.write_and_attend(layer, step.query, step.key, step.value)


def tolerance(step: Step, layer: LayerAttention, kv_dtype: str) -> float:
    """Bound the error. Queries and weights off by a relative e move scores by e · scale · Σ|q||k|. Weights that are off
    by that much move a mean of values, in numerator and denominator."""
    numbers = [step.key, *(keys.flatten(0, 1) for keys, _ in step.past)]
    most = max(float(each.norm(dim=-1).max()) for each in numbers if each.numel())
    score = abs(layer.scale) * most * float(step.query.norm(dim=-1).max())
    values = [step.value, *(values for _, values in step.past)]
    largest = max(float(each.abs().max()) for each in values if each.numel())
    return ROUNDING[kv_dtype] * 2 * (score + 1) * largest + 1e-5


def check(library: ctypes.CDLL, step: Step, layer: LayerAttention, kv_dtype: str, **options: int) -> None:
    typed = in_type(step, kv_dtype)
    out = attend(library, typed, layer, **options)
    np.testing.assert_allclose(out.numpy(), reference(typed, layer), atol=tolerance(typed, layer, kv_dtype), rtol=0)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=NAMES)
def test_mixed_rows_attend_as_the_formula_says(library: ctypes.CDLL, layer: LayerAttention, kv_dtype: str) -> None:
    check(library, random_step(Case(MIXED)), layer, kv_dtype, threads=3)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=NAMES)
def test_whole_tiles_of_queries_and_keys(library: ctypes.CDLL, layer: LayerAttention, kv_dtype: str) -> None:
    case = Case(((150, 1), (70, 40), (0, 23)), 16, head_dim_k=32, head_dim_v=32)
    check(library, random_step(case), layer, kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("dim_k", "dim_v"), [(96, 64), (40, 32), (21, 13)])
def test_values_that_are_a_prefix_of_keys(library: ctypes.CDLL, dim_k: int, dim_v: int, kv_dtype: str) -> None:
    case = Case(((150, 1), (33, 1), (70, 40), (0, 23)), 16, 20, 1, dim_k, dim_v, values_in_keys=True)
    check(library, random_step(case), LAYERS[0], kv_dtype)
    check(library, random_step(replace(case, rows=((700, 1), (3, 1)), block_size=64)), LAYERS[0], kv_dtype, threads=3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_long_context_is_cut_and_merged(library: ctypes.CDLL, kv_dtype: str, deterministic: bool) -> None:
    case = Case(((700, 1), (3, 1)), 64, num_heads=2, num_kv_heads=1, head_dim_k=16, head_dim_v=16, layers=1)
    layer = LayerAttention(layer=0, scale=0.4, sinks=torch.tensor([0.4, -0.5]))
    check(library, random_step(case), layer, kv_dtype, threads=3, deterministic=deterministic)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("slope", [0.05, 0.5, 5.0, -0.5])
def test_scores_that_rise_or_fall_along_the_context(library: ctypes.CDLL, slope: float, kv_dtype: str) -> None:
    """What weights are relative to moves seldom, at each tile, or by more than a float has powers of two."""
    case = Case(((0, 380), (300, 40)), 32, num_heads=2, num_kv_heads=1, head_dim_k=32, head_dim_v=32, layers=1)
    step = random_step(case)
    for keys in (step.key[:380, 0], step.past[1][0][0, :, 0], step.key[380:, 0]):
        first = 300 if len(keys) == 40 else 0
        keys.zero_()[:, 0] = slope * torch.arange(first, first + len(keys))
    step.query.zero_()[..., 0] = 1.0  # scores are numbers of K, which are exact
    typed = in_type(step, kv_dtype)
    out = attend(library, typed, LayerAttention(layer=0, scale=1.0))
    error = 4 * ROUNDING[kv_dtype] * float(step.value.abs().max()) + 1e-5
    np.testing.assert_allclose(out.numpy(), reference(typed, LayerAttention(layer=0, scale=1.0)), atol=error, rtol=0)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (200, None), (None, 5), (None, 200)])
def test_items_of_many_groups_of_lanes(
    library: ctypes.CDLL, window: int | None, chunk: int | None, kv_dtype: str
) -> None:
    """One thread's items are as large as a kernel takes: some groups of lanes see no slot of some tiles."""
    case = Case(((90, 1100),), 128, num_heads=2, num_kv_heads=1, head_dim_k=32, head_dim_v=32, layers=1)
    check(library, random_step(case), LayerAttention(0, 0.3, window, chunk=chunk), kv_dtype, threads=1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, LayerAttention]:
    size = draw(st.sampled_from([4, 8, 16, 32, 64, 128, 256]))
    longest = min(12 * size, 300)
    start = st.integers(0, longest - 20)
    decodes = draw(st.lists(st.tuples(start, st.just(1)), max_size=4))
    prefills = draw(st.lists(st.tuples(start, st.integers(2, 20)), max_size=2))
    assume(decodes or prefills)
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4), (1, 14), (1, 70)]))
    dim_k, dim_v, in_keys = draw(st.integers(1, 80)), draw(st.integers(1, 80)), draw(st.booleans())
    dims = (max(dim_k, dim_v), min(dim_k, dim_v)) if in_keys else (dim_k, dim_v)
    rows = (*decodes, *prefills)
    span, in_chunks = draw(st.sampled_from([None, 1, 3, 17, 64, 100])), draw(st.booleans())
    case = Case(rows, size, kv_heads * group, kv_heads, *dims, layers=1, values_in_keys=in_keys)
    layer = LayerAttention(
        layer=0,
        scale=draw(st.sampled_from([0.1, 0.25, -0.1])),
        softcap=draw(st.sampled_from([None, 3.0])),
        sinks=draw(st.sampled_from([None, torch.linspace(-1, 1, kv_heads * group)])),
        window=None if in_chunks else span,
        chunk=span if in_chunks else None,
    )
    return random_step(case, draw(st.integers(0, 99))), layer


@pytest.mark.parametrize("level", native.levels_here())
@settings(max_examples=25, deadline=None)
@given(steps(), st.sampled_from(KV_DTYPES), st.sampled_from([1, 3]), st.booleans())
def test_any_shape(
    level: str, step_and_layer: tuple[Step, LayerAttention], kv_dtype: str, threads: int, deterministic: bool
) -> None:
    step, layer = step_and_layer
    check(native.load(level), step, layer, kv_dtype, threads=threads, deterministic=deterministic)


def test_layers_of_several_windows_share_a_step(library: ctypes.CDLL) -> None:
    step = random_step(Case(MIXED))
    attention = NativeAttention(step.cache, library=library)
    attention.begin(step.metadata)
    for layer in (LayerAttention(layer=0, scale=0.3, window=3), PLAIN, LayerAttention(layer=0, scale=0.3, window=7)):
        out = attention.write_and_attend(layer, step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, layer), atol=1e-5)


def test_trimmed_blocks_may_be_any(library: ctypes.CDLL) -> None:
    step = random_step(Case(((45, 1), (30, 9))))
    layer = LayerAttention(layer=1, scale=0.3, window=6)
    expected = reference(step, layer)
    step.metadata.block_table[0, : (45 - 5) // 4] = 0
    step.metadata.block_table[1, : (30 - 5) // 4] = 0
    np.testing.assert_allclose(attend(library, step, layer).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_of_four_slots_may_lie_as_far_apart_as_one_of_sixteen(library: ctypes.CDLL, kv_dtype: str) -> None:
    """Scales of 16 slots are read at once where they lie side by side; the first and the last of these four look so."""
    step = random_step(Case(((18, 1),), 4, num_kv_heads=1))
    table = step.metadata.block_table[0]
    left = sorted(set(range(1, 13)) - {int(table[4])})
    first = next(block for block in left if block + 3 in left)
    others = [block for block in left if block not in (first, first + 3)]
    table[:4] = [first, others[-1], others[0], first + 3]
    check(library, step, PLAIN, kv_dtype)


@pytest.mark.parametrize("query_type", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_any_strides_and_types(library: ctypes.CDLL, query_type: torch.dtype) -> None:
    step = in_type(random_step(Case(MIXED)), "bfloat16")
    step = replace(step, query=step.query.to(query_type).float())
    apart = replace(
        step,
        query=step.query.to(query_type).permute(2, 0, 1).contiguous().permute(1, 2, 0),  # columns are not neighbours
        key=torch.cat((step.key, step.value), dim=-1).to(query_type)[..., : step.key.shape[-1]],
        value=step.value.to(query_type).transpose(0, 1).contiguous().transpose(0, 1),
    )
    out = attend(library, apart, PLAIN)
    assert out.dtype == query_type
    atol = tolerance(step, PLAIN, "bfloat16") * (2 if query_type == torch.bfloat16 else 1)
    np.testing.assert_allclose(out.float().numpy(), reference(step, PLAIN), atol=atol)


# ---------------------------------------------------------------- shared prefixes


def share(step: Step, blocks: Sequence[int]) -> None:
    """Give row r the first blocks[r] blocks of row 0, in the table and in the reference."""
    keys, values = step.past[0]
    for row, count in enumerate(blocks):
        slots = count * step.case.block_size
        step.metadata.block_table[row, :count] = step.metadata.block_table[0, :count]
        for mine, first in zip(step.past[row], (keys, values), strict=True):
            mine[:, :slots] = first[:, :slots]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_decodes_that_share_prefixes(library: ctypes.CDLL, kv_dtype: str, threads: int) -> None:
    """A prefix that all share, a longer one that some of them share, rows of their own, and one of the prefix alone."""
    rows = ((180, 1), (170, 1), (160, 1), (96, 1), (191, 1), (90, 1), (5, 1), (3, 4))
    step = random_step(Case(rows, 16, num_heads=8, num_kv_heads=2, head_dim_k=16, head_dim_v=16))
    share(step, [0, 10, 10, 6, 6, 0, 0, 0])
    check(library, step, PLAIN, kv_dtype, threads=threads)
    check(library, step, replace(PLAIN, chunk=100), kv_dtype, threads=threads)


# ---------------------------------------------------------------- the cache write


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_written_is_what_torch_writes(library: ctypes.CDLL, kv_dtype: str) -> None:
    step = random_step(Case(MIXED, head_dim_k=24, head_dim_v=20))
    for tensor, odd in ((step.key, (torch.inf, -torch.inf, torch.nan, 1e30)), (step.value, (0.0, -0.0, 3e38, 7e4))):
        tensor[0, 0, :4] = torch.tensor(odd)
        tensor[1, 1] = 0.0
    ours, theirs = in_type(step, kv_dtype).cache, in_type(step, kv_dtype).cache
    attend(library, replace(step, cache=ours), PLAIN)
    torch_attention = TorchAttention(theirs)
    torch_attention.begin(step.metadata)
    torch_attention.write_and_attend(PLAIN, step.query, step.key, step.value)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)
    if kv_dtype == "int8":
        assert ours.key_scales is not None
        assert theirs.key_scales is not None
        assert torch.equal(ours.key_scales, theirs.key_scales)


def test_a_cache_that_native_kernels_cannot_read_is_left_to_torch() -> None:
    caches = {name: KvCache(KvGeometry(1, 1, 16, 16, name), 4, 16, CPU) for name in ("float32", "int8", "fp8")}
    chosen = {name: type(make_backend("auto", cache)) for name, cache in caches.items()}
    assert chosen == {"float32": NativeAttention, "int8": NativeAttention, "fp8": TorchAttention}


# ---------------------------------------------------------------- the same bits


BITS = Case(((590, 1),), 64, num_heads=6, num_kv_heads=2, head_dim_k=40, head_dim_v=24, layers=1)
ONE_LAYER = LayerAttention(layer=0, scale=0.3, sinks=torch.linspace(-1, 1, 6))
REACHES: list[dict[str, int]] = [{}, {"window": 70}, {"chunk": 70}]


def run_in_steps(
    library: ctypes.CDLL,
    kv_dtype: str,
    cuts: Sequence[int],
    layer: LayerAttention,
    beside: int = 0,
    threads: int = 1,
    decodes_from: int | None = None,
    shared: int = 0,
) -> torch.Tensor:
    """Return the outputs of one sequence of 300 positions, computed in steps that end at `cuts`, with neighbours.

    The neighbours decode at positions of their own, before it if it decodes, else around it. With `decodes_from`, each
    position from there on has a row of its own, as drafts have, and attention is not deterministic. All have the first
    `shared` blocks in common.
    """
    draw = torch.Generator().manual_seed(5)
    whole = [torch.randn((300, heads, d), generator=draw) for heads, d in ((6, 40), (2, 40), (2, 24))]
    others = [torch.randn((beside, heads, d), generator=draw) for heads, d in ((6, 40), (2, 40), (2, 24))]
    cache = KvCache(KvGeometry(1, 2, 40, 24, kv_dtype), 64 + 32 * beside, 16, CPU)
    attention = NativeAttention(cache, deterministic=decodes_from is None, threads=threads, library=library)
    table = np.random.default_rng(1).permutation(cache.num_blocks).astype(np.int32).reshape(-1, 32)[: beside + 1]
    table[:, :shared] = table[beside, :shared]
    out, begin = [], 0
    for end in cuts:
        lengths = [1] * (end - begin) if decodes_from is not None and begin >= decodes_from else [end - begin]
        starts = range(begin, end, lengths[0])
        start = np.array([*(80 + 90 * n for n in range(beside)), *starts], dtype=np.int32)
        blocks = np.concatenate((table[:beside], np.repeat(table[beside:], len(lengths), axis=0)))
        rows = pack_rows(start, np.array([1] * beside + lengths, dtype=np.int32), blocks, 16)
        attention.begin(attention_metadata(rows, to_device(attention_arrays(rows), CPU)))
        query, key, value = (torch.cat((o, w[begin:end])) for o, w in zip(others, whole, strict=True))
        out.append(attention.write_and_attend(layer, query, key, value)[beside:])
        begin = end
    return torch.cat(out)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_deterministic_bits_depend_on_nothing_but_the_sequence(
    library: ctypes.CDLL, kv_dtype: str, reach: dict[str, int]
) -> None:
    layer = replace(ONE_LAYER, **reach)  # type: ignore[arg-type]
    expected = run_in_steps(library, kv_dtype, [300], layer)
    for cuts, beside, threads in (
        ([7, 64, 256, 290, 291, 300], 0, 3),
        ([150, 299, 300], 3, 1),
        ([255, 257, 258, 300], 1, 1),
    ):
        found = run_in_steps(library, kv_dtype, cuts, layer, beside, threads)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (cuts, beside, threads)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_drafts_have_the_bits_of_plain_decodes_in_any_batch(
    library: ctypes.CDLL, kv_dtype: str, reach: dict[str, int]
) -> None:
    layer = replace(ONE_LAYER, **reach)  # type: ignore[arg-type]
    expected = run_in_steps(library, kv_dtype, range(240, 301), layer, decodes_from=240)[240:]
    for cuts, beside, threads in (([240, 243, 257, 300], 0, 1), ([240, 243, 257, 300], 0, 3), ([240, 270, 300], 3, 2)):
        found = run_in_steps(library, kv_dtype, cuts, layer, beside, threads, decodes_from=240)[240:]
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (cuts, beside, threads)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_drafts_have_the_bits_of_plain_decodes_beside_the_same_sharers(library: ctypes.CDLL, kv_dtype: str) -> None:
    found = [
        run_in_steps(library, kv_dtype, cuts, ONE_LAYER, beside=4, decodes_from=240, shared=4)[240:]
        for cuts in (range(240, 301), [240, 243, 257, 300])
    ]
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_of_a_head_do_not_depend_on_the_heads_beside_it(
    library: ctypes.CDLL, kv_dtype: str, head_dim: int
) -> None:
    """Kernels have functions of their own for these sizes and for one to four heads that share a K/V head."""
    case = Case(((70, 1), (63, 1)), 16, num_heads=8, num_kv_heads=1, head_dim_k=head_dim, head_dim_v=head_dim, layers=1)
    layer = LayerAttention(layer=0, scale=head_dim**-0.5)
    step = in_type(random_step(case), kv_dtype)
    expected = attend(library, step, layer)
    np.testing.assert_allclose(expected, reference(step, layer), atol=tolerance(step, layer, kv_dtype), rtol=0)
    for heads in range(1, 8):
        found = attend(library, replace(step, query=step.query[:, :heads].contiguous()), layer)
        assert torch.equal(found.view(torch.int32), expected[:, :heads].contiguous().view(torch.int32)), heads


def test_without_it_the_same_step_gives_the_same_bits(library: ctypes.CDLL) -> None:
    step = in_type(random_step(BITS), "bfloat16")
    first = attend(library, step, ONE_LAYER, threads=3)
    for _ in range(5):
        assert torch.equal(attend(library, step, ONE_LAYER, threads=3), first)
