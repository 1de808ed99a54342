"""Groups of layers: which there are, how many pages their blocks take, and where in them each layer lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory.byte_plan import KIB, BytePlan, bytes_per_block, longest_sequence
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import IndexKey, LayerShape, Part, Reach, geometry_of, page_layout, with_groups

CPU = torch.device("cpu")
FULL = Reach()


def window(span: int) -> Reach:
    return Reach(KvGroupKind.WINDOW, span)


def chunk(span: int) -> Reach:
    return Reach(KvGroupKind.CHUNK, span)


def grouped(
    *layers: tuple[int, LayerShape, Reach], dtype: str = "bfloat16", sources: Mapping[int, int] | None = None
) -> KvGeometry:
    """Return the geometry of so many layers of each shape and reach, one kind after the other."""
    every = [(shape, reach) for count, shape, reach in layers for _ in range(count)]
    shared = sources or {}
    shapes = {layer: shape for layer, (shape, _) in enumerate(every) if layer not in shared}
    return with_groups(
        geometry_of(shapes, dtype, 0), {layer: reach for layer, (_, reach) in enumerate(every)}, shared, 16
    )


def shape(heads: int, keys: int, values: int | None = None) -> LayerShape:
    return LayerShape(heads, keys, keys if values is None else values)


# Layers of published models in bfloat16, blocks of 16 slots: pages a block of each group, KiB a page.
PUBLISHED: dict[str, tuple[KvGeometry, list[int], int]] = {
    "gpt-oss-20b": (grouped((12, shape(8, 64), FULL), (12, shape(8, 64), window(128))), [1, 1], 384),
    "gpt-oss-120b": (grouped((18, shape(8, 64), FULL), (18, shape(8, 64), window(128))), [1, 1], 576),
    "gemma-3-1b": (grouped((4, shape(1, 256), FULL), (22, shape(1, 256), window(512))), [2, 11], 32),
    "gemma-3-4b": (grouped((5, shape(4, 256), FULL), (29, shape(4, 256), window(1024))), [5, 29], 64),
    "gemma-3-12b": (grouped((8, shape(8, 256), FULL), (40, shape(8, 256), window(1024))), [1, 5], 1024),
    "gemma-3-27b": (grouped((10, shape(16, 128), FULL), (52, shape(16, 128), window(1024))), [5, 26], 256),
    "gemma-4-26b-a4b": (grouped((5, shape(2, 512), FULL), (25, shape(8, 256), window(1024))), [1, 10], 320),
    "gemma-4-31b": (grouped((10, shape(4, 512), FULL), (50, shape(16, 256), window(1024))), [1, 10], 1280),
    "llama-4-scout": (grouped((12, shape(8, 128), FULL), (36, shape(8, 128), chunk(8192))), [1, 3], 768),
    "mimo-v2-flash": (grouped((9, shape(4, 192, 128), FULL), (39, shape(8, 192, 128), window(129))), [1, 9], 360),
    "olmo-3-7b": (grouped((8, shape(32, 128), FULL), (24, shape(32, 128), window(4096))), [1, 3], 2048),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_take_few_pages_a_block(name: str) -> None:
    geometry, pages, size = PUBLISHED[name]
    assert [group.pages for group in geometry.groups] == pages
    assert bytes_per_block(geometry, 16) == size * KIB


def test_groups_name_their_layers_the_full_one_first() -> None:
    geometry = grouped((1, shape(2, 16), window(8)), (2, shape(2, 16), FULL), (1, shape(2, 16), window(4)))
    assert geometry.groups == (
        KvGroup(KvGroupKind.FULL, 0, 2, (1, 2)),
        KvGroup(KvGroupKind.WINDOW, 4, 1, (3,)),
        KvGroup(KvGroupKind.WINDOW, 8, 1, (0,)),
    )


@pytest.mark.parametrize(
    "layers",
    [
        [(3, shape(2, 16), FULL)],
        [(3, shape(2, 16), window(8))],
        [(2, shape(2, 16), window(8)), (2, shape(2, 16), chunk(8))],
        [(2, shape(2, 16), FULL), (2, shape(3, 16), window(8))],
        [(2, shape(2, 16, 16), FULL), (2, shape(4, 16, 8), window(8))],
        [(2, LayerShape(1, 16, 8, values_in_keys=True), FULL), (2, shape(2, 16), window(8))],
        [(2, replace(shape(2, 16), index=IndexKey(8, "float32")), FULL), (2, shape(2, 16), window(8))],
    ],
)
def test_one_lifetime_or_shapes_that_share_no_lanes_are_one_group(layers: list[tuple[int, LayerShape, Reach]]) -> None:
    assert grouped(*layers).groups == ()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_scales_want_equal_shapes(dtype: str) -> None:
    narrow, wide = shape(2, 16), shape(4, 16)
    assert grouped((2, narrow, FULL), (2, wide, window(8)), dtype=dtype).groups == ()
    geometry = grouped((2, narrow, FULL), (2, narrow, window(8)), dtype=dtype)
    assert [group.pages for group in geometry.groups] == [1, 1]
    cache = KvCache(geometry, 3, 4, CPU)
    assert sum(pool.nbytes for pool in cache.pools) == 3 * bytes_per_block(geometry, 4)


@pytest.mark.parametrize(
    ("reader", "source", "fits"),
    [
        (FULL, FULL, True),
        (FULL, window(8), False),
        (window(8), FULL, True),
        (window(8), window(8), True),
        (window(9), window(8), False),
        (chunk(8), window(8), True),
        (window(8), chunk(8), False),
        (chunk(4), chunk(8), True),
        (chunk(5), chunk(8), False),
        (FULL, chunk(8), False),
    ],
)
def test_a_layer_reads_no_further_than_its_source_keeps(reader: Reach, source: Reach, fits: bool) -> None:
    assert reader.is_within(source) == fits
    one = shape(2, 16)
    others = (1, one, FULL), (1, one, window(8)), (1, one, source)
    geometry = grouped(*others, (1, one, reader), sources={3: 2})
    assert bool(geometry.groups) == fits
    assert all(3 not in group.layers for group in geometry.groups)


def test_layers_lie_in_the_lanes_of_their_pages_one_after_the_other() -> None:
    one = shape(2, 16)
    geometry = replace(
        grouped((2, one, FULL), (5, one, window(8))),
        groups=(KvGroup(KvGroupKind.FULL, 0, 1, (0, 1)), KvGroup(KvGroupKind.WINDOW, 8, 3, (2, 3, 4, 5, 6))),
    )
    layout = page_layout(geometry)
    assert layout.lanes == KvGeometry(2, 2, 16, 16, "bfloat16")
    assert layout.parts == (
        Part(0, 0, 1, 0, 0, 1, {0: (0,), 1: (1,)}),
        Part(1, 0, 3, 0, 0, 1, {2: (0,), 3: (1,)}),
        Part(1, 1, 3, 0, 0, 1, {4: (0,), 5: (1,)}),
        Part(1, 2, 3, 0, 0, 1, {6: (0,)}),
    )


def test_layers_of_half_the_size_share_a_lane() -> None:
    geometry = grouped((4, shape(1, 32), FULL), (2, shape(4, 16), window(8)), dtype="float32")
    assert [group.pages for group in geometry.groups] == [1, 1]
    layout = page_layout(geometry)
    assert [shares for _, shares in layout.shapes] == [2, 1]
    assert layout.parts == (
        Part(0, 0, 1, 0, 0, 2, {0: (0,), 2: (1,)}),
        Part(0, 0, 1, 0, 1, 2, {1: (0,), 3: (1,)}),
        Part(1, 0, 1, 1, 0, 1, {4: (0,), 5: (1,)}),
    )
    cache = KvCache(geometry, 6, 4, CPU)
    halves, wholes = cache.parts
    assert (halves.num_blocks, halves.keys.shape) == (12, (2, 12, 1, 4, 32))
    assert (wholes.num_blocks, wholes.keys.shape) == (6, (2, 6, 4, 4, 16))
    halves.keys[1, 2 * 5 + 1] = 1
    assert float(wholes.keys[1, 5].sum()) == 4 * 32
    assert float(wholes.keys.sum()) == 4 * 32
    assert sum(pool.nbytes for pool in cache.pools) == 6 * bytes_per_block(geometry, 4)


def test_heads_of_a_layer_lie_in_several_lanes_where_that_saves_memory() -> None:
    geometry = grouped((2, shape(1, 32), FULL), (2, shape(6, 16), window(8)), dtype="float32")
    assert [group.pages for group in geometry.groups] == [1, 3]
    layout = page_layout(geometry)
    assert layout.lanes == KvGeometry(2, 1, 32, 32, "float32")
    assert layout.shapes == ((layout.lanes, 1), (KvGeometry(2, 2, 16, 16, "float32"), 1))
    assert layout.parts == (
        Part(0, 0, 1, 0, 0, 1, {0: (0,), 1: (1,)}),
        Part(1, 0, 3, 1, 0, 1, {2: (0, 1)}),
        Part(1, 1, 3, 1, 0, 1, {2: (0,), 3: (1,)}),
        Part(1, 2, 3, 1, 0, 1, {3: (0, 1)}),
    )
    cache = KvCache(geometry, 6, 4, CPU)
    wholes, heads = cache.parts
    assert (heads.num_blocks, heads.keys.shape, heads.values.shape) == (6, (2, 6, 2, 4, 16), (2, 6, 2, 4, 16))
    heads.values[1, 5] = 1
    assert float(wholes.values[1, 5].sum()) == float(wholes.values.sum()) == 4 * 32
    assert sum(pool.nbytes for pool in cache.pools) == 6 * bytes_per_block(geometry, 4)


@pytest.mark.parametrize(
    ("layers", "pages", "lane"),
    [
        # Three lanes would make the pages 1 and 2, which are read as those of two large lanes, and waste nothing.
        ([(3, shape(1, 32), FULL), (3, shape(4, 16), window(8))], [3, 6], 32),
        # Nothing is lost with large lanes, or less than two points.
        ([(2, shape(1, 32), FULL), (1, shape(4, 16), window(8))], [1, 1], 64),
        ([(99, shape(1, 32), FULL), (50, shape(4, 16), window(8))], [1, 1], 64),
        # Three heads are no two times as many.
        ([(1, shape(1, 24), FULL), (1, shape(3, 16), window(8))], [1, 1], 48),
        # A layer of two thirds shares no large lane with another one.
        ([(1, shape(1, 32), FULL), (1, shape(2, 32), FULL), (1, shape(3, 32), window(8))], [1, 1], 32),
    ],
)
def test_lanes_are_as_large_as_saves_memory(
    layers: list[tuple[int, LayerShape, Reach]], pages: list[int], lane: int
) -> None:
    geometry = grouped(*layers)
    assert [group.pages for group in geometry.groups] == pages
    unit = page_layout(geometry).lanes
    assert unit.num_kv_heads * unit.head_dim_k == lane


def test_pages_that_no_lanes_make_are_refused() -> None:
    geometry = grouped((2, shape(2, 16), FULL), (5, shape(2, 16), window(8)))
    groups = (replace(geometry.groups[0], pages=2), replace(geometry.groups[1], pages=1))
    with pytest.raises(ValueError, match="no number of lanes makes these pages"):
        page_layout(replace(geometry, groups=groups))


def test_a_copy_takes_all_lanes_of_a_page() -> None:
    cache = KvCache(grouped((3, shape(1, 32), FULL), (2, shape(4, 16), window(8))), 3, 4, CPU)
    for pool in cache.pools:
        pool[:, 2] = 1
    cache.copy_blocks([Copy(BlockId(2), BlockId(0), 4)])
    assert all(bool((pool[:, 0] == 1).all()) and not pool[:, 1].float().any() for pool in cache.pools)


sizes = st.sampled_from(
    [shape(heads, keys, keys // 2) for heads, keys in ((1, 64), (2, 32), (4, 32), (3, 64), (8, 32))]
)
reaches = st.sampled_from([FULL, window(128), window(1024), chunk(8192)])
# Where K and V of a layer lie in a block of its group: the range of bytes of each lane, by the order of its heads.
Places = dict[int, list[tuple[range, range]]]


def grouped_in_order(layers: list[tuple[LayerShape, Reach]]) -> KvGeometry:
    return grouped(*((1, each, reach) for each, reach in layers))


def numbers_of(layers: list[tuple[LayerShape, Reach]]) -> list[int]:
    return [each.num_kv_heads * each.head_dim_k for each, _ in layers]


def places_of(cache: KvCache, pages: list[list[int]]) -> Places:
    """Return where each layer lies, if a block of each group has these pages."""
    geometry, found = cache.geometry, Places()
    keys, values = cache.pools
    for part in page_layout(geometry).parts:
        seen, page = cache.parts[part.shape], pages[part.group][part.page]
        assert part.pages == geometry.groups[part.group].pages > part.page
        assert part.shares > part.share
        for layer, lanes in part.lanes.items():
            assert layer in geometry.groups[part.group].layers
            for lane in lanes:
                block = page * part.shares + part.share
                pair = (seen.keys[lane, block], keys), (seen.values[lane, block], values)
                found.setdefault(layer, []).append((_bytes(*pair[0]), _bytes(*pair[1])))
    return found


def _bytes(block: torch.Tensor, pool: torch.Tensor) -> range:
    assert block.is_contiguous()
    first = block.data_ptr() - pool.data_ptr()
    assert 0 <= first <= first + block.nbytes <= pool.nbytes
    return range(first, first + block.nbytes)


@given(st.lists(st.tuples(sizes, reaches), min_size=2, max_size=80), st.randoms(use_true_random=False))
def test_each_layer_has_a_place_of_its_own(layers: list[tuple[LayerShape, Reach]], order: Random) -> None:
    """Blocks of all groups on scattered pages: K and V of every layer lie in the pools, apart from all others."""
    geometry = grouped_in_order(layers)
    if not geometry.groups:
        kinds, numbers = {reach for _, reach in layers}, numbers_of(layers)
        assert len(kinds) == 1 or FULL not in kinds or any(each % min(numbers) for each in numbers)
        return
    several = [group.pages for group in geometry.groups for _ in range(2)]
    free = list(range(sum(several) + 1))
    order.shuffle(free)
    cache = KvCache(geometry, len(free), 2, CPU)
    taken: list[set[int]] = [set(), set()]
    for turn in range(2):
        pages = [[free.pop() for _ in range(group.pages)] for group in geometry.groups]
        places = places_of(cache, pages)
        assert sorted(places) == list(range(len(layers)))
        for layer, lanes in places.items():
            each = layers[layer][0]
            for index, size in enumerate((each.head_dim_k, each.head_dim_v)):
                parts = [lane[index] for lane in lanes]
                assert sum(map(len, parts)) == 2 * 2 * each.num_kv_heads * size
                assert len({len(part) for part in parts}) == 1
                for part in parts:
                    assert taken[index].isdisjoint(part), turn
                    taken[index].update(part)


@given(st.lists(st.tuples(st.integers(1, 12), sizes, reaches), min_size=2, max_size=4))
def test_pages_of_layers_by_heads_are_never_those_of_whole_layers(kinds: list[tuple[int, LayerShape, Reach]]) -> None:
    geometry, layers = grouped(*kinds), [(each, reach) for count, each, reach in kinds for _ in range(count)]
    if not geometry.groups:
        return
    numbers, layout = numbers_of(layers), page_layout(geometry)
    most, unit = max(numbers), layout.lanes.num_kv_heads * layout.lanes.head_dim_k
    if any(most % each for each in numbers):
        assert unit == min(numbers)
        return
    counts = [Counter(layers[layer][0] for layer in group.layers) for group in geometry.groups]
    whole = [
        sum(-(-count // (most // (each.num_kv_heads * each.head_dim_k))) for each, count in its.items())
        for its in counts
    ]
    ways = [[-(-count // lanes) for count in whole] for lanes in range(1, max(whole) + 1)]
    assert ([group.pages for group in geometry.groups] in ways) == (unit == most)
    for lanes, pages in enumerate(ways, start=1):
        groups = [replace(group, pages=each) for group, each in zip(geometry.groups, pages, strict=True)]
        read = page_layout(replace(geometry, groups=tuple(groups))).lanes
        assert read.num_kv_heads * read.head_dim_k == most
        assert read.num_layers <= lanes


def plan(num_blocks: int) -> BytePlan:
    geometry = PUBLISHED["gpt-oss-20b"][0]
    page = bytes_per_block(geometry, 16)
    limit = 131072
    longest = longest_sequence(limit, num_blocks, 16, 0, geometry.groups)
    return BytePlan("cpu", 0, 0, 0, 0, 0, page, num_blocks, 16, "bfloat16", limit, longest, 64, groups=geometry.groups)


def test_sequences_hold_their_windows_alone() -> None:
    made = plan(20000)
    assert [made.needed(n) for n in (16, 128, 1024, 65536)] == [2, 16, 64 + 10, 4096 + 10]
    assert made.sequences_of(65536) == 20000 // 4106
    assert made.max_model_len == 131072
    assert plan(110).max_model_len == 1600
    assert plan(1).max_model_len == 0


def test_the_plan_has_a_line_for_each_group() -> None:
    lines = plan(20000).lines()
    assert lines[4] == "  KV cache        7.3 GiB  20000 pages of 16 slots in bfloat16, 384.0 KiB each"
    each = "12 layers, 1 page a block, 24.0 KiB a token, at most"
    assert lines[5] == f"    all tokens       {each} 8192 blocks a sequence"
    assert lines[6] == f"    window of 128    {each} 10 blocks a sequence"
    fits = "270 of 1k, 38 of 8k, 4 of 64k, 2 of the longest"
    assert lines[9] == f"sequences that fit at once: {fits}; at most 64 run in a step"
