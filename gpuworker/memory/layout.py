"""Where K and V of each layer lie in a worker's blocks: in a pool for each shape of layer.

A block holds the K/V of its slots in all layers, and is one block to the manager: it knows its bytes alone. Where
layers differ in heads or head sizes, `KvGeometry.shapes` says so in one line, which is a part of the pool's identity:

    a=8x256+256 b=2x512+512 aaaaabaaaa-b
    |                       one letter a layer of the model; a layer with - has no K/V of its own
    heads x K + V; with / in place of + V is a prefix of K; ,128:bfloat16 behind V is an index key and its type

    pool a [9 layers, blocks, 8, block_size, 256] twice, pool b [2, blocks, 2, block_size, 512] twice
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from string import ascii_letters
from typing import Final

from common.contracts.types import KvGeometry

_NONE: Final = "-"
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


def geometry_of(shapes: Mapping[int, LayerShape], dtype: str, window: int) -> KvGeometry:
    """Return the geometry of the layers that have K/V of their own, by their numbers in the model.

    Raises ValueError when there is none, or more kinds of them than letters.
    """
    kinds = list(dict.fromkeys(shapes[layer] for layer in sorted(shapes)))
    if not 0 < len(kinds) <= len(ascii_letters):
        raise ValueError(f"{len(kinds)} shapes of layers; expected 1 to {len(ascii_letters)}")
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
    """Return the pools of a geometry, one for each shape. Raises ValueError for `shapes` of another form."""
    if not geometry.shapes:
        return (Pool(geometry, tuple(range(geometry.num_layers))),)
    *words, layers = geometry.shapes.split(" ")
    kinds = dict(map(_parsed, words))
    if set(layers) - {_NONE} != set(kinds) or sum(each != _NONE for each in layers) != geometry.num_layers:
        raise ValueError(f"{geometry.shapes!r} does not give each of {geometry.num_layers} layers a shape")
    return tuple(
        _pool(geometry, shape, [number for number, each in zip(count(), layers, strict=False) if each == letter])
        for letter, shape in kinds.items()
    )


def numbers_a_layer(geometry: KvGeometry) -> int:
    """Return how many numbers a token has in a layer, in K and V together; the most of all layers."""
    return max(pool.geometry.num_kv_heads * kept_numbers(pool.geometry) for pool in pools_of(geometry))


def kept_numbers(geometry: KvGeometry) -> int:
    """Return how many numbers a head of a token has in a layer of one shape, in K and V together."""
    return geometry.head_dim_k + (0 if geometry.values_in_keys else geometry.head_dim_v)


def _pool(geometry: KvGeometry, shape: LayerShape, layers: Sequence[int]) -> Pool:
    made = replace(
        geometry,
        num_layers=len(layers),
        num_kv_heads=shape.num_kv_heads,
        head_dim_k=shape.head_dim_k,
        head_dim_v=shape.head_dim_v,
        values_in_keys=shape.values_in_keys,
        shapes="",
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
