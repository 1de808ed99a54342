"""Where K and V of each layer lie in a worker's blocks: in a pool for each shape of layer, or in lanes of pages.

A block holds the K/V of its slots in all layers, and is one block to the manager: it knows its bytes alone. Where
layers differ in heads or head sizes, `KvGeometry.shapes` says so in one line, which is a part of the pool's identity:

    a=8x256+256 b=2x512+512 aaaaabaaaa-b
    |                       one letter a layer of the model; a layer with - has no K/V of its own
    heads x K + V; with / in place of + V is a prefix of K; ,128:bfloat16 behind V is an index key and its type

    pool a [9 layers, blocks, 8, block_size, 256] twice, pool b [2, blocks, 2, block_size, 512] twice

Where no layer attends there is no pool. Sequences have blocks all the same, by which they are admitted and grow.

Where layers keep K/V for different times, they are groups (`KvGeometry.groups`), and memory consists of pages. A page
has lanes, each of which has room for one block of a layer of the largest shape. Of a shape that takes a half or a third
of that, so many layers share a lane. The layers of a group lie in the lanes of its block's pages, one after the other:

    group of 5 layers, 2 lanes a page      page 0: layers 0, 1      page 1: layers 2, 3      page 2: layer 4, unused
    pool [2 lanes, pages, heads, block_size, d] twice; a table of pages serves all lanes of a page

Where that wastes memory, lanes are as large as a layer of a smaller shape. A layer of twice or three times the size
then has its heads in so many lanes, one after the other, which may lie in several pages:

    3 layers in halves a and b, 3 lanes a page      page 0: layer 0 a, layer 0 b, layer 1 a
                                                    page 1: layer 1 b, layer 2 a, layer 2 b

Layers that keep a state are the last group. A block of it, a checkpoint, holds all states of one sequence as bytes, in
what K and V of the pages' lanes would take (`gpuworker/memory/state_store.py`). Of such models layers that attend are a
group even if they all read equally long: that of all lanes of one page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from string import ascii_letters
from typing import Final

from common.contracts.lease import held_blocks
from common.contracts.limits import MAX_BLOCK_PAGES, MAX_KV_GROUPS
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind

_NONE: Final = "-"
# The types of K and V, and the bytes of one number.
KV_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
# Types of K and V that carry a float32 scale for each (slot, head).
SCALED: Final = ("int8", "fp8")
# The pages of a block, of the group that has the fewest; memory that padding may take beyond the least; lengths at
# which it is looked at.
_MOST_PAGES: Final = 32
_MORE_WASTE: Final = 0.02
# The same of layers by heads, whose lanes are smaller and make more pages.
_MORE_BY_HEADS: Final = 0.03
_LENGTHS: Final = (512, 2048, 8192, 65536)
_SHAPE: Final = re.compile(r"([a-zA-Z])=(\d+)x(\d+)([+/])(\d+)(?:,(\d+):([a-z0-9]+))?")


@dataclass(frozen=True, slots=True)
class IndexKey:
    """The key by which a layer's indexer finds a token: how many numbers, and their type, whatever that of K and V."""

    size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of a token in one layer; with `values_in_keys` V is a prefix of K."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    values_in_keys: bool = False
    index: IndexKey | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """The layers of one shape, by their numbers in the model: the n-th one is layer n of the pool."""

    geometry: KvGeometry
    layers: tuple[int, ...]
    index: IndexKey | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back the queries of a layer see: all, or a window or a chunk of `span` tokens."""

    kind: KvGroupKind = KvGroupKind.FULL
    span: int = 0

    def is_within(self, other: Reach) -> bool:
        """Return whether queries with this reach see nothing that those with the other one do not see."""
        if other.kind is KvGroupKind.FULL or self.kind is KvGroupKind.FULL:
            return other.kind is KvGroupKind.FULL
        if other.kind is KvGroupKind.WINDOW:
            return self.span <= other.span
        return self.kind is KvGroupKind.CHUNK and other.span % self.span == 0


def reach_of(window: int | None, chunk: int | None, limit: int) -> Reach:
    """Return the reach of a layer; a window or a chunk that holds every context of `limit` tokens bounds nothing."""
    if chunk is not None and chunk < limit:
        return Reach(KvGroupKind.CHUNK, chunk)
    if window is not None and window < limit:
        return Reach(KvGroupKind.WINDOW, window)
    return Reach()


@dataclass(frozen=True, slots=True)
class Part:
    """Layers that one table serves: those of a group in one page of its blocks, and in one share of their lanes.

    A block of the group is `pages` pages, of which this is number `page`. A lane has `shares` layers of this shape, and
    block i of the part is block i * shares + share of the pool of that `shape`, in the order of `pools_of`. `lanes` has
    the layers' lanes, by their numbers in the model. A layer whose heads lie in several lanes has those of this part,
    in the order of its heads; where they lie in several parts, those come in that order too.
    """

    group: int
    page: int
    pages: int
    shape: int
    share: int
    shares: int
    lanes: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How pages are used: `lanes` is the pool of them; `shapes` are the same memory, seen with each shape of layers.

    Beside each shape stands how many of its layers share a lane. It has the heads that a layer has in one lane.
    """

    lanes: KvGeometry
    shapes: tuple[tuple[KvGeometry, int], ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Fit:
    """How layers of a shape lie in lanes: `shares` of them in one, or each by heads in `splits`; one of both is 1."""

    shares: int = 1
    splits: int = 1

    def lanes(self, count: int) -> int:
        """Return how many lanes so many layers take."""
        return -(-count // self.shares) * self.splits


@dataclass(frozen=True, slots=True)
class _Choice:
    waste: float
    groups: tuple[KvGroup, ...]

    @property
    def pages(self) -> int:
        return sum(group.pages for group in self.groups)


def geometry_of(shapes: Mapping[int, LayerShape], dtype: str, window: int) -> KvGeometry:
    """Return the geometry of the layers that have K/V of their own, by their numbers in the model.

    Raises ValueError when there are more kinds of them than letters.
    """
    if not shapes:
        return KvGeometry(0, 0, 0, 0, dtype)
    kinds = list(dict.fromkeys(shapes[layer] for layer in sorted(shapes)))
    if len(kinds) > len(ascii_letters):
        raise ValueError(f"{len(kinds)} shapes of layers; expected at most {len(ascii_letters)}")
    first = kinds[0]
    plain = KvGeometry(
        len(shapes), first.num_kv_heads, first.head_dim_k, first.head_dim_v, dtype, window, first.values_in_keys
    )
    if len(kinds) == 1 and first.index is None and sorted(shapes) == list(range(len(shapes))):
        return plain
    words = [f"{letter}={_in_words(kind)}" for letter, kind in zip(ascii_letters, kinds, strict=False)]
    layers = (ascii_letters[kinds.index(shapes[n])] if n in shapes else _NONE for n in range(max(shapes) + 1))
    return replace(plain, shapes=" ".join([*words, "".join(layers)]))


def pools_of(geometry: KvGeometry) -> tuple[Pool, ...]:
    """Return the pools of a geometry, one for each shape; none without layers.

    Raises ValueError for `shapes` of another form.
    """
    if not geometry.num_layers:
        return ()
    if not geometry.shapes:
        return (Pool(replace(geometry, groups=()), tuple(range(geometry.num_layers))),)
    *words, layers = geometry.shapes.split(" ")
    kinds = dict(map(_parsed, words))
    if set(layers) - {_NONE} != set(kinds) or sum(each != _NONE for each in layers) != geometry.num_layers:
        raise ValueError(f"{geometry.shapes!r} does not give each of {geometry.num_layers} layers a shape")
    return tuple(
        _pool(geometry, shape, [number for number, each in zip(count(), layers, strict=False) if each == letter])
        for letter, shape in kinds.items()
    )


def of_ranks(geometry: KvGeometry, ranks: int) -> KvGeometry:
    """Return the shape of what all ranks keep together, from that of each: they have equally many heads.

    Groups stay as they are: every rank has its part of the same pages.
    """
    if ranks == 1 or not geometry.num_layers:
        return geometry
    if not geometry.shapes:
        return replace(geometry, num_kv_heads=geometry.num_kv_heads * ranks)
    shapes = {
        layer: LayerShape(
            pool.geometry.num_kv_heads * ranks,
            pool.geometry.head_dim_k,
            pool.geometry.head_dim_v,
            pool.geometry.values_in_keys,
            pool.index,
        )
        for pool in pools_of(geometry)
        for layer in pool.layers
    }
    return replace(geometry_of(shapes, geometry.dtype, geometry.window), groups=geometry.groups)


def numbers_a_layer(geometry: KvGeometry) -> int:
    """Return how many numbers a token has in a layer, in K and V together; the most of all layers."""
    each = (pool.geometry.num_kv_heads * kept_numbers(pool.geometry) for pool in pools_of(geometry))
    return max(each, default=0)


def kept_numbers(geometry: KvGeometry) -> int:
    """Return how many numbers a head of a token has in a layer of one shape, in K and V together."""
    return geometry.head_dim_k + (0 if geometry.values_in_keys else geometry.head_dim_v)


def with_groups(
    geometry: KvGeometry, reaches: Mapping[int, Reach], sources: Mapping[int, int], block_size: int
) -> KvGeometry:
    """Return the geometry with its layers in groups of one reach each, the full one first; unchanged with one group.

    `reaches` has all layers that attend, `sources` those whose K and V are another layer's, by their numbers in the
    model. It is unchanged too where a layer reads longer than its source, where layers of several shapes do not fit
    into lanes, and where layers have index keys.
    """
    own = {layer: reach for layer, reach in reaches.items() if layer not in sources}
    kinds = sorted(set(own.values()), key=lambda reach: (reach.span, reach.kind))
    one = len(kinds) <= 1 or kinds[0].kind is not KvGroupKind.FULL or len(kinds) > MAX_KV_GROUPS
    if one or not all(reaches[layer].is_within(own[source]) for layer, source in sources.items()):
        return geometry
    groups = [
        KvGroup(reach.kind, reach.span, 1, tuple(sorted(layer for layer in own if own[layer] == reach)))
        for reach in kinds
    ]
    whole, by_heads = _choices(geometry, groups, block_size)
    fit = _fewest_pages(whole, _MORE_WASTE)
    split = _fewest_pages(by_heads, _MORE_BY_HEADS)
    if split and (not fit or min(choice.waste for choice in whole) > split.waste + _MORE_WASTE):
        fit = split
    return replace(geometry, groups=fit.groups) if fit else geometry


def with_states(geometry: KvGeometry, layers: Iterable[int], state_bytes: int, block_size: int) -> KvGeometry:
    """Return the geometry with a group for checkpoints, where `layers` keep states of so many bytes a sequence.

    It is unchanged where no pages can hold them: where every layer that attends has a window, where shapes do not share
    lanes, where layers have index keys, and where a checkpoint takes more pages than a block may have.
    """
    pools = pools_of(geometry)
    fits = pools and _ways(geometry, pools) and len(geometry.groups) + 1 < MAX_KV_GROUPS
    if geometry.window or not fits or not state_bytes:
        return geometry
    attending = tuple(sorted(layer for pool in pools for layer in pool.layers))
    groups = geometry.groups or (KvGroup(KvGroupKind.FULL, 0, 1, attending),)
    pages = checkpoint_pages(replace(geometry, groups=groups), state_bytes, block_size)
    if pages > MAX_BLOCK_PAGES:
        return geometry
    return replace(geometry, groups=(*groups, KvGroup(KvGroupKind.STATE, 0, pages, tuple(sorted(set(layers))))))


def checkpoint_pages(geometry: KvGeometry, state_bytes: int, block_size: int) -> int:
    """Return how many pages the states of one sequence take, in K and V alone: scales stay as they are."""
    lanes = page_layout(geometry).lanes
    numbers = lanes.num_layers * lanes.num_kv_heads * kept_numbers(lanes) * block_size
    return -(-state_bytes // (numbers * KV_BYTES[lanes.dtype]))


def state_group(groups: Sequence[KvGroup]) -> KvGroup | None:
    """Return the group whose blocks are checkpoints of states, the last one; None where there is none."""
    return groups[-1] if groups and groups[-1].kind is KvGroupKind.STATE else None


def attending_groups(groups: Sequence[KvGroup]) -> Sequence[KvGroup]:
    """Return the groups that keep K and V: all before that of states."""
    return groups if state_group(groups) is None else groups[:-1]


def page_layout(geometry: KvGeometry) -> PageLayout:
    """Return how the pages of a geometry with groups are used; a group of states has no parts.

    Raises ValueError for pages that no lanes make.
    """
    pools, groups = pools_of(geometry), attending_groups(geometry.groups)
    ways = ((fits, _lanes_of_pages(pools, fits, groups)) for fits in _ways(geometry, pools))
    fits, lanes = next((way for way in ways if way[1]), ((), 0))
    if not lanes:
        raise ValueError(f"no number of lanes makes these pages: {', '.join(map(str, groups))}")
    shapes = tuple(
        (replace(pool.geometry, num_layers=lanes, num_kv_heads=pool.geometry.num_kv_heads // fit.splits), fit.shares)
        for pool, fit in zip(pools, fits, strict=True)
    )
    unit = shapes[fits.index(_Fit())][0]
    parts = [part for place, group in enumerate(groups) for part in _parts(pools, fits, place, group, lanes)]
    return PageLayout(unit, shapes, tuple(parts))


def _choices(
    geometry: KvGeometry, groups: Sequence[KvGroup], block_size: int
) -> tuple[Sequence[_Choice], Sequence[_Choice]]:
    """Return the groups with each number of pages that their blocks may have: with whole layers in lanes, by heads.

    Pages of layers by heads that would be read as those of another way are left out.
    """
    pools = pools_of(geometry)
    ways = _ways(geometry, pools)
    found: tuple[list[_Choice], list[_Choice]] = [], []
    for number, fits in enumerate(ways):
        kept = [_lanes(pools, fits, group) for group in groups]
        exact = [
            sum(_count(pool, group) * fit.splits / fit.shares for pool, fit in zip(pools, fits, strict=True))
            for group in groups
        ]
        for lanes in sorted({-(-each // pages) for each in kept for pages in range(1, _MOST_PAGES + 1)}):
            paged = tuple(replace(group, pages=-(-count // lanes)) for group, count in zip(groups, kept, strict=True))
            if any(_lanes_of_pages(pools, earlier, paged) for earlier in ways[:number]):
                continue
            by_heads = any(fit.splits > 1 for fit in fits)
            found[by_heads].append(_Choice(_waste(paged, lanes, exact, block_size), paged))
    return found


def _fewest_pages(choices: Sequence[_Choice], more: float) -> _Choice | None:
    """Return the choice with the fewest pages a block of those that waste at most so much more than the least."""
    least = min((choice.waste for choice in choices), default=0.0)
    fit = (choice for choice in choices if choice.waste <= least + more)
    return min(fit, key=lambda choice: (choice.pages, choice.waste), default=None)


def _ways(geometry: KvGeometry, pools: Sequence[Pool]) -> Sequence[tuple[_Fit, ...]]:
    """Return the ways in which the layers of all pools fit into lanes, the one with the largest lanes first."""
    if len(pools) == 1 and pools[0].index is None:
        return [(_Fit(),)]
    if geometry.dtype in SCALED or any(pool.index is not None or pool.geometry.values_in_keys for pool in pools):
        return []
    units = sorted({_numbers(pool.geometry) for pool in pools}, reverse=True)
    tried = ([fit for pool in pools if (fit := _fit(pool.geometry, unit))] for unit in units)
    return [tuple(fits) for fits in tried if len(fits) == len(pools)]


def _fit(geometry: KvGeometry, unit: tuple[int, int]) -> _Fit | None:
    """Return how layers of a shape fit into lanes for so many numbers of K and of V a token; None if they do not."""
    (keys, values), (key, value) = unit, _numbers(geometry)
    fit = _Fit(max(1, keys // key), max(1, key // keys))
    fills = (key * fit.shares, value * fit.shares) == (keys * fit.splits, values * fit.splits)
    return fit if fills and geometry.num_kv_heads % fit.splits == 0 else None


def _numbers(geometry: KvGeometry) -> tuple[int, int]:
    """Return the numbers of K and of V of a token in one layer."""
    return geometry.num_kv_heads * geometry.head_dim_k, geometry.num_kv_heads * geometry.head_dim_v


def _count(pool: Pool, group: KvGroup) -> int:
    """Return how many layers of a pool are in a group."""
    return len({*pool.layers} & {*group.layers})


def _lanes(pools: Sequence[Pool], fits: Sequence[_Fit], group: KvGroup) -> int:
    """Return how many lanes the layers of a group take; a lane has layers of one shape."""
    return sum(fit.lanes(_count(pool, group)) for pool, fit in zip(pools, fits, strict=True))


def _lanes_of_pages(pools: Sequence[Pool], fits: Sequence[_Fit], groups: Sequence[KvGroup]) -> int:
    """Return the least number of lanes that gives blocks of the groups the pages that they have; 0 where none does."""
    kept = [_lanes(pools, fits, group) for group in groups]
    lanes = max(-(-count // group.pages) for count, group in zip(kept, groups, strict=True))
    return lanes if [-(-count // lanes) for count in kept] == [group.pages for group in groups] else 0


def _waste(groups: Sequence[KvGroup], lanes: int, exact: Sequence[float], block_size: int) -> float:
    """Return how much more memory sequences hold than their layers fill, as a share of that, at the worst length."""
    found = []
    for length in _LENGTHS:
        held = [held_blocks(group, -(-length // block_size), block_size) for group in groups]
        taken = sum(count * group.pages * lanes for count, group in zip(held, groups, strict=True))
        found.append(taken / sum(count * each for count, each in zip(held, exact, strict=True)) - 1)
    return max(found)


def _parts(pools: Sequence[Pool], fits: Sequence[_Fit], place: int, group: KvGroup, lanes: int) -> Sequence[Part]:
    found: dict[tuple[int, int, int], dict[int, tuple[int, ...]]] = {}
    first = 0
    for shape, (pool, fit) in enumerate(zip(pools, fits, strict=True)):
        layers = [layer for layer in pool.layers if layer in group.layers]
        for number, layer in enumerate(layers):
            begin = first + number // fit.shares * fit.splits
            for each in range(begin, begin + fit.splits):
                page, lane = divmod(each, lanes)
                part = found.setdefault((page, shape, number % fit.shares), {})
                part[layer] = (*part.get(layer, ()), lane)
        first += fit.lanes(len(layers))
    return [
        Part(place, page, group.pages, shape, share, fits[shape].shares, of)
        for (page, shape, share), of in found.items()
    ]


def _pool(geometry: KvGeometry, shape: LayerShape, layers: Sequence[int]) -> Pool:
    made = replace(
        geometry,
        num_layers=len(layers),
        num_kv_heads=shape.num_kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        values_in_keys=shape.values_in_keys,
        shapes="",
        groups=(),
    )
    return Pool(made, tuple(layers), shape.index)


def _in_words(shape: LayerShape) -> str:
    index = "" if shape.index is None else f",{shape.index.size}:{shape.index.dtype}"
    return f"{shape.num_kv_heads}x{shape.head_dim_k}{'/' if shape.values_in_keys else '+'}{shape.head_dim_v}{index}"


def _parsed(word: str) -> tuple[str, LayerShape]:
    match = _SHAPE.fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} is not the shape of a layer, such as a=8x256+256")
    letter, heads, key, mark, value, size, dtype = match.groups()
    index = None if size is None else IndexKey(int(size), dtype)
    return letter, LayerShape(int(heads), int(key), int(value), mark == "/", index)
