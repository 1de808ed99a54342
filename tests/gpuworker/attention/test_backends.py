"""Every attention backend against plain float64 loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.contracts.errors import InvalidConfig
from common.contracts.types import KvGeometry, KvGroupKind
from gpuworker.attention import torch_backend as torch_attention
from gpuworker.attention.backends import backends_on, make_backend
from gpuworker.attention.by_shape import AttentionByIndex
from gpuworker.attention.interface import AttentionMetadata, LayerAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_pages, to_device
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import LayerShape, Reach, geometry_of, page_layout, pools_of, with_groups
from gpuworker.native import library as native
from tests.support.gpuworker.attention_reference import AROUND_CHUNKS, Case, Step, in_type, random_step, reference

MIXED = ((7, 1), (30, 1), (1, 1), (45, 1), (0, 9), (13, 6), (0, 1))
PLAIN = LayerAttention(layer=1, scale=0.3)


@pytest.fixture(params=backends_on("cpu"))
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.best() is None:
        pytest.skip("the native library was not built")
    return str(request.param)


def check(backend: str, case: Case, layer: LayerAttention) -> None:
    step = random_step(case)
    attention = make_backend(backend, step.cache)
    attention.begin(step.metadata)
    out = attention.write_and_attend(layer, step.query, step.key, step.value)
    np.testing.assert_allclose(out.numpy(), reference(step, layer), atol=2e-5)


@pytest.mark.parametrize(
    "layer",
    [
        PLAIN,
        LayerAttention(layer=0, scale=0.3, window=5),
        LayerAttention(layer=1, scale=0.3, window=9),
        LayerAttention(layer=1, scale=0.5, softcap=2.0),
        LayerAttention(layer=0, scale=0.3, sinks=torch.tensor([-1.0, 0.0, 0.5, 2.0])),
        LayerAttention(layer=1, scale=0.3, window=6, softcap=1.5, sinks=torch.tensor([0.0, 1.0, -2.0, 0.3])),
    ],
    ids=["plain", "window5", "window9", "softcap", "sinks", "all"],
)
def test_mixed_rows_attend_as_the_formula_says(backend: str, layer: LayerAttention) -> None:
    check(backend, Case(MIXED), layer)


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("chunk", [1, 5, 8, 12, 64])
def test_queries_see_their_chunk_alone(backend: str, chunk: int, block_size: int) -> None:
    check(backend, Case(AROUND_CHUNKS, block_size), LayerAttention(layer=1, scale=0.3, chunk=chunk))


def test_a_chunk_with_all_other_options(backend: str) -> None:
    sinks = torch.tensor([0.0, 1.0, -2.0, 0.3])
    check(backend, Case(AROUND_CHUNKS), LayerAttention(layer=0, scale=0.3, chunk=12, softcap=1.5, sinks=sinks))


def test_chunks_windows_and_the_whole_share_a_step(backend: str) -> None:
    step = random_step(Case(AROUND_CHUNKS))
    attention = make_backend(backend, step.cache)
    attention.begin(step.metadata)
    layers = (replace(PLAIN, chunk=12), replace(PLAIN, window=12), PLAIN, replace(PLAIN, chunk=5))
    for layer in layers:
        out = attention.write_and_attend(layer, step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, layer), atol=2e-5)


@pytest.mark.parametrize("layer", [replace(PLAIN, chunk=12), replace(PLAIN, window=9), PLAIN], ids=str)
def test_one_sequence_without_a_cache_sees_the_same(layer: LayerAttention) -> None:
    step = random_step(Case(((0, 30),)))
    out = torch_attention.attend_packed(layer, step.query, step.key, step.value)
    np.testing.assert_allclose(out.numpy(), reference(step, layer), atol=2e-5)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_heads_share_their_kv_head(backend: str, heads: int, kv_heads: int, block_size: int) -> None:
    check(backend, Case(MIXED, block_size, heads, kv_heads), PLAIN)


def test_values_may_be_narrower_than_keys(backend: str) -> None:
    check(backend, Case(MIXED, head_dim_k=24, head_dim_v=12), PLAIN)


@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize(("heads", "dim_k", "dim_v"), [(1, 24, 16), (4, 24, 16), (7, 19, 9), (20, 72, 64)])
def test_values_may_be_a_prefix_of_keys(backend: str, heads: int, dim_k: int, dim_v: int, block_size: int) -> None:
    case = Case(MIXED, block_size, heads, 1, dim_k, dim_v, values_in_keys=True)
    check(backend, case, PLAIN)
    check(backend, case, LayerAttention(layer=0, scale=0.3, window=9, softcap=1.5))


def test_values_may_be_a_prefix_of_the_keys_of_several_heads(backend: str) -> None:
    check(backend, Case(MIXED, 16, 6, 2, 40, 24, values_in_keys=True), PLAIN)


def test_a_layer_may_attend_on_what_another_one_wrote(backend: str) -> None:
    step = random_step(Case(MIXED))
    attention = make_backend(backend, step.cache)
    attention.begin(step.metadata)
    attention.write_and_attend(LayerAttention(layer=0, scale=0.3), step.query, step.key, step.value)
    before = [pool.clone() for pool in step.cache.pools]
    other = LayerAttention(layer=7, scale=0.2, window=9, source=0)
    query, unread = 2 * step.query, torch.full_like(step.key, torch.nan)
    out = attention.write_and_attend(other, query, unread, unread)
    expected = reference(replace(step, query=query), replace(other, layer=0))
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-5)
    assert all(torch.equal(pool, was) for pool, was in zip(step.cache.pools, before, strict=True))


def choose(step: Step, count: int) -> torch.Tensor:
    """Return [T, count]: positions of each query's context, its own among them, and numbers that stand for none."""
    draw, chosen = np.random.default_rng(1), []
    for start, length in step.case.rows:
        for position in range(start, start + length):
            seen = draw.permutation(position + 1)[: count - 3]
            none = [-1, position + 1, 999, *[-1] * (count - 3 - len(seen))]  # what comes later is not seen
            chosen.append([*seen[:-1], position, *none])
    return torch.tensor(chosen, dtype=torch.int32)


@pytest.mark.parametrize(
    "layer", [PLAIN, replace(PLAIN, softcap=2.0), replace(PLAIN, sinks=torch.tensor([-1.0, 0.0, 0.5, 2.0]))]
)
@pytest.mark.parametrize("rows", [MIXED, ((40, 1), (2, 1), (46, 1), (3, 1), (41, 1)), ((0, 21), (7, 30))])
def test_queries_keep_the_positions_of_their_indices(
    rows: tuple[tuple[int, int], ...], layer: LayerAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = random_step(Case(rows))
    chosen = replace(layer, indices=choose(step, 9))
    attention = TorchAttention(step.cache)
    for most in (torch_attention.MAX_MASK, 100):
        monkeypatch.setattr(torch_attention, "MAX_MASK", most)
        attention.begin(step.metadata)
        out = attention.write_and_attend(chosen, step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, chosen), atol=2e-5)


class Named:
    """Says in its results which backend attended, and how often it was told of a step."""

    def __init__(self, name: float) -> None:
        self.name, self.steps = name, 0

    def begin(self, step: AttentionMetadata) -> None:
        self.steps += 1

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return torch.tensor([self.name, 0.0 if layer.indices is None else 1.0])


def test_attention_is_sparse_only_where_a_row_sees_more_than_it_keeps() -> None:
    step, full, sparse = random_step(Case(((7, 1), (0, 9)))), Named(1.0), Named(2.0)
    attention = AttentionByIndex(full, sparse)
    attention.begin(step.metadata)
    for count, wanted in ((9, [1.0, 0.0]), (10, [1.0, 0.0]), (8, [2.0, 1.0]), (8, [2.0, 1.0])):
        layer = replace(PLAIN, indices=torch.zeros((10, count), dtype=torch.int32))
        assert attention.write_and_attend(layer, step.query, step.key, step.value).tolist() == wanted
    assert attention.write_and_attend(PLAIN, step.query, step.key, step.value).tolist() == [1.0, 0.0]
    assert (full.steps, sparse.steps) == (1, 1)


def test_decodes_of_very_different_lengths_keep_their_places(backend: str) -> None:
    case = Case(((40, 1), (2, 1), (150, 1), (3, 1), (41, 1), (149, 1), (90, 1)), block_size=16)
    check(backend, case, PLAIN)


def test_a_long_prefill_attends_in_parts(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "MAX_MASK", 100)
    check(backend, Case(((7, 1), (5, 21), (0, 30))), PLAIN)
    check(backend, Case(((7, 1), (5, 21), (0, 30))), LayerAttention(layer=1, scale=0.3, window=6, softcap=1.5))
    check(backend, Case(((7, 1), (5, 21), (0, 30))), LayerAttention(layer=1, scale=0.3, chunk=11))


def test_only_prefills(backend: str) -> None:
    check(backend, Case(((0, 5), (4, 11))), PLAIN)


def test_a_row_reads_what_another_row_of_the_step_writes(backend: str) -> None:
    """Two rows on the same blocks: the second starts where the first one's positions end, in the same step."""
    step = random_step(Case(((0, 8), (8, 4))))
    shared = step.metadata.block_table[1]
    first, second = (slice(0, 8), slice(8, 12))
    step.metadata.block_table[0] = shared
    step.metadata.slot_mapping[first] = shared[np.arange(8) // 4] * 4 + np.arange(8) % 4
    attention = make_backend(backend, step.cache)
    attention.begin(step.metadata)
    out = attention.write_and_attend(PLAIN, step.query, step.key, step.value)
    whole = random_step(Case(((0, 12),)))
    alone = make_backend(backend, whole.cache)
    alone.begin(whole.metadata)
    expected = alone.write_and_attend(PLAIN, step.query, step.key, step.value)
    torch.testing.assert_close(out[second], expected[second])


def test_what_a_masked_slot_holds_weighs_nothing(backend: str) -> None:
    """One sequence writes infinities; its block then goes to another, whose tokens stop short of them."""
    step = random_step(Case(((0, 4),)))
    attention = make_backend(backend, step.cache)
    attention.begin(step.metadata)
    attention.write_and_attend(PLAIN, step.query, step.key, torch.full_like(step.value, torch.inf))
    fresh = random_step(Case(((0, 2),)))
    fresh.metadata.block_table[:] = step.metadata.block_table
    fresh.metadata.slot_mapping[:] = step.metadata.slot_mapping[:2]
    attention.begin(fresh.metadata)
    out = attention.write_and_attend(PLAIN, fresh.query, fresh.key, fresh.value)
    np.testing.assert_allclose(out.numpy(), reference(fresh, PLAIN), atol=2e-5)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_torch_attends_over_what_a_narrow_cache_keeps(kv_dtype: str) -> None:
    for case in (Case(MIXED), Case(MIXED, 4, 6, 1, 24, 16, values_in_keys=True)):
        step = in_type(random_step(case), kv_dtype)
        attention = TorchAttention(step.cache)
        attention.begin(step.metadata)
        out = attention.write_and_attend(PLAIN, step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, PLAIN), atol=2e-5)


def test_without_the_native_library_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "best", lambda: None)
    cache = random_step(Case(((0, 1),))).cache
    assert isinstance(make_backend("auto", cache), TorchAttention)
    with pytest.raises(InvalidConfig, match="--attention: 'native'; expected auto, torch"):
        make_backend("native", cache)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="--attention: 'magic'"):
        make_backend("magic", random_step(Case(((0, 1),))).cache)


def test_layers_of_several_shapes_attend_on_the_same_blocks(backend: str) -> None:
    """Each layer on its pool, a gap in between, and a layer that attends on what another one wrote."""
    case = Case(MIXED, 16, 6, 2, 24, 24, layers=1)
    cases = {0: case, 1: replace(case, num_kv_heads=1, head_dim_k=40, head_dim_v=32, values_in_keys=True), 3: case}
    steps = {layer: random_step(each) for layer, each in cases.items()}
    shapes = {
        layer: LayerShape(each.num_kv_heads, each.head_dim_k, each.head_dim_v, each.values_in_keys)
        for layer, each in cases.items()
    }
    first = steps[0]
    cache = KvCache(geometry_of(shapes, "float32", 0), first.cache.num_blocks, 16, torch.device("cpu"))
    for pool, part in zip(pools_of(cache.geometry), cache.parts, strict=True):
        for index, layer in enumerate(pool.layers):
            for ours, given in zip(part.pools, steps[layer].cache.pools, strict=True):
                ours[index] = given[0]
    attention = make_backend(backend, cache)
    attention.begin(first.metadata)
    for layer, step in steps.items():
        out = attention.write_and_attend(LayerAttention(layer, 0.3), step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, LayerAttention(0, 0.3)), atol=2e-5)
    shared, unread = LayerAttention(4, 0.2, window=9, source=1), torch.full_like(steps[1].key, torch.nan)
    out = attention.write_and_attend(shared, steps[1].query, unread, unread)
    np.testing.assert_allclose(out.numpy(), reference(steps[1], LayerAttention(0, 0.2, window=9)), atol=2e-5)


def filled_pages(geometry: KvGeometry, steps: dict[int, Step], block_size: int) -> tuple[KvCache, AttentionMetadata]:
    """Return a cache of pages with the pasts of each layer's step, on other blocks than theirs, and the step on it."""
    rows = steps[0].case.rows
    counts = [steps[0].metadata.block_table.size * group.pages for group in geometry.groups]
    pages = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = [each.reshape(len(rows), -1) for each in np.split(pages, np.cumsum(counts[:-1]))]
    cache, parts = KvCache(geometry, len(pages), block_size, torch.device("cpu")), page_layout(geometry).parts
    start, length = np.array(rows, dtype=np.int32).T
    packed = pack_pages(start, length, tables, parts, block_size)
    metadata = attention_metadata(packed, to_device(attention_arrays(packed), torch.device("cpu")))
    filled = dict.fromkeys(steps, 0)
    for part, seen in zip(parts, metadata.parts, strict=True):
        for layer, lane in ((layer, lane) for layer, lanes in part.lanes.items() for lane in lanes):
            pool, given, table = cache.parts[part.shape], steps[layer].cache, steps[layer].metadata.block_table
            heads = slice(filled[layer], filled[layer] + pool.geometry.num_kv_heads)
            pool.keys[lane, seen.block_table] = given.keys[0, table, heads]
            pool.values[lane, seen.block_table] = given.values[0, table, heads]
            filled[layer] = heads.stop
    assert filled == {layer: step.case.num_kv_heads for layer, step in steps.items()}
    return cache, metadata


def test_heads_of_a_layer_attend_in_several_lanes(backend: str) -> None:
    """Full layers of one head beside windowed ones of six, which have two in each of three lanes, in two pages."""
    full, wide = Case(MIXED, 16, 6, 1, 32, 32, layers=1), Case(MIXED, 16, 12, 6, 16, 16, layers=1)
    cases = {0: full, 1: full, 2: wide, 3: replace(wide, num_heads=6)}
    steps = {layer: random_step(each, layer) for layer, each in cases.items()}
    shapes = {layer: LayerShape(each.num_kv_heads, each.head_dim_k, each.head_dim_v) for layer, each in cases.items()}
    reaches = {layer: Reach() if layer < 2 else Reach(KvGroupKind.WINDOW, 9) for layer in cases}
    geometry = with_groups(geometry_of(shapes, "float32", 0), reaches, {}, 16)
    assert [group.pages for group in geometry.groups] == [1, 3]
    cache, metadata = filled_pages(geometry, steps, 16)
    attention = make_backend(backend, cache)
    attention.begin(metadata)
    for layer, step in steps.items():
        sinks = torch.linspace(-1, 1, step.case.num_heads) if layer == 3 else None
        here = LayerAttention(layer, 0.3, None if layer < 2 else 9, sinks=sinks)
        out = attention.write_and_attend(here, step.query, step.key, step.value)
        np.testing.assert_allclose(out.numpy(), reference(step, replace(here, layer=0)), atol=2e-5)
    shared, unread = LayerAttention(4, 0.2, window=7, softcap=2.0, source=2), torch.full_like(steps[2].key, torch.nan)
    out = attention.write_and_attend(shared, steps[2].query, unread, unread)
    np.testing.assert_allclose(out.numpy(), reference(steps[2], replace(shared, layer=0, source=None)), atol=2e-5)
