"""The tile sizes of the attention kernel for each chip, and how finely a step is cut.

Decoding is bound by loading K and V: small tiles of queries, and enough bytes of K/V in flight at once. Prefill is
bound by the matrix units: tiles as large as the registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.runtime import driver

from gpuworker.attention.work_list import Cut

# What a tile of a decode loads, K and V together. Two ahead in each of three programs of a multiprocessor cover the
# latency of HBM several times.
_STAGE_BYTES = 32 << 10
# Quantised elements of K or V that four warps widen at once without running out of registers.
_WIDENED = 8192
# Of heads wider than this, a program takes so many query heads at most: 128 of 576 numbers would take 256 KiB.
_WIDE, _WIDE_GROUP = 256, 16
# Shared memory that holds no tile of K or V: weights on their way between warps, barriers.
_SPARE_BYTES = 8 << 10
# Programs that should run at once on a multiprocessor, and the shortest chunk worth a partial result.
_SINGLE_PROGRAMS, _SINGLE_CHUNK = 4, 128
_MANY_PROGRAMS, _MANY_CHUNK = 2, 256


@dataclass(frozen=True, slots=True)
class Chip:
    """The relevant properties of a device: compute capability (80, 90, 100), multiprocessors, memory of a program."""

    capability: int
    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The relevant properties of a layer: its heads, their sizes, and bytes of an element of q and of the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    query_bytes: int
    cache_bytes: int

    @property
    def slices(self) -> int:
        """Programs that share the query heads of a K/V head: beside tiles of wide heads there is room for few rows."""
        whole = self.num_heads // self.num_kv_heads
        most = _WIDE_GROUP if self.widest > _WIDE else whole
        return next(count for count in range(1, whole + 1) if whole % count == 0 and whole // count <= most)

    @property
    def stacks(self) -> int:
        """Programs of an item."""
        return self.num_kv_heads * self.slices

    @property
    def group(self) -> int:
        """Query heads of a program; they share a K/V head."""
        return self.num_heads // self.stacks

    @property
    def tile_k(self) -> int:
        """head_dim_k, rounded up to what a matrix product takes."""
        return max(16, power_of_two(self.head_dim_k))

    @property
    def tile_v(self) -> int:
        """head_dim_v, rounded up to what a matrix product takes."""
        return max(16, power_of_two(self.head_dim_v))

    @property
    def widest(self) -> int:
        return max(self.tile_k, self.tile_v)

    @property
    def padded(self) -> bool:
        """Whether a tile is wider than its heads."""
        return (self.tile_k, self.tile_v) != (self.head_dim_k, self.head_dim_v)

    def partial_floats(self, count: int) -> int:
        """Return the floats of so many partial results: the outputs of all heads and the weight of each."""
        return count * self.num_heads * (self.head_dim_v + 1)


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Rows of queries and positions of K/V that a program holds at once, and how Triton compiles it."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shapes for items of one query and of many, and how items are cut."""

    single: KernelShape
    many: KernelShape
    single_cut: Cut
    many_cut: Cut


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _power_below(n: int) -> int:
    """Return the largest power of two that is at most n; 0 for 0."""
    return (1 << n.bit_length()) >> 1


def chip_of(device: torch.device) -> Chip:
    """Return the properties of a device; a CPU, where kernels run in Triton's interpreter, counts as a tiny chip."""
    if device.type != "cuda":
        return Chip(90, 2, 227 << 10)
    major, minor = torch.cuda.get_device_capability(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    found = driver.active.utils.get_device_properties(index)
    return Chip(10 * major + minor, found["multiprocessor_count"], found["max_shared_mem"])


def tuning(chip: Chip, heads: Heads) -> Tuning:
    single, many = _single(chip, heads), _many(chip, heads)
    programs = chip.multiprocessors
    return Tuning(
        single,
        many,
        Cut(1, single.tile, max(_SINGLE_CHUNK, single.tile), -(-_SINGLE_PROGRAMS * programs // heads.stacks)),
        Cut(
            max(1, many.block_m // heads.group),
            many.tile,
            max(_MANY_CHUNK, many.tile),
            -(-_MANY_PROGRAMS * programs // heads.stacks),
        ),
    )


def _single(chip: Chip, heads: Heads) -> KernelShape:
    """Tiles of _STAGE_BYTES, or as many as can be widened in registers where K and V are quantised."""
    if heads.group > 32:
        # So many rows of queries fill a large tile by themselves.
        large = _many(chip, heads)
        return _shape(chip, heads, large.block_m, min(large.tile, 64), large.num_warps)
    tile = _power_below(_STAGE_BYTES // ((heads.tile_k + heads.tile_v) * heads.cache_bytes))
    if heads.cache_bytes == 1:
        tile = min(tile, _WIDENED // heads.widest)
    return _shape(chip, heads, max(16, power_of_two(heads.group)), min(max(tile, 16), 128), 4)


def _many(chip: Chip, heads: Heads) -> KernelShape:
    """The largest tiles that spill no registers under Triton 3.6 and 3.7, as tests/suites/triton_compiled finds."""
    old, quantised = chip.capability < 90, heads.cache_bytes == 1
    if heads.query_bytes == 4:
        # Full float32 products run on the vector units, out of registers: for checking, not for speed.
        block_m, tile, warps = 16, 16, 4
    elif heads.widest > 256 or (quantised and heads.widest > 128):
        block_m, tile, warps = 32, 16 if quantised and heads.widest > 256 else 32, 8
    elif heads.widest > 128:
        block_m, tile, warps = 64, 32, 8
    elif quantised:
        block_m, tile, warps = 64 if old else 128, 32, 8
    elif heads.padded:
        block_m, tile, warps = 64, 32 if old else 64, 8
    elif old:
        block_m, tile, warps = 128, 64 if heads.widest <= 64 else 32, 8
    else:
        block_m, tile, warps = 128, 128 if chip.capability < 100 else 64, 8
    return _shape(chip, heads, max(block_m, power_of_two(heads.group)), tile, warps)


def _shape(chip: Chip, heads: Heads, block_m: int, tile: int, warps: int) -> KernelShape:
    """Load two tiles ahead, where shared memory beside the queries allows it.

    Triton counts a stage for each load that depends on another: block ids are loaded before their contents, so a tile
    ahead takes two stages. The matrix units of sm_90 and later read K and V in place, which occupies one more buffer.
    """
    if heads.query_bytes == 4:
        tile = 16
    left = chip.shared_bytes - _SPARE_BYTES - block_m * heads.tile_k * heads.query_bytes
    buffers = left // (tile * (heads.tile_k + heads.tile_v) * heads.cache_bytes)
    busy = 1 if chip.capability >= 90 and block_m >= 64 else 0
    return KernelShape(block_m, tile, warps, 2 * max(1, min(2, buffers - busy)) + 1)
