"""Native attention on this CPU, one layer at a time, against reading K and V alone and against torch's attention.

The floor of a decode is a plain loop of vector loads on the same threads. It reads as many bytes as the layer's K and V
have. Quire and the floor take turns, each call on the next of many layers; both use memory larger than the last-level
cache. The figure is the first quartile of calls: other load on the machine slows most calls, and the quickest calls hit
a cache. Blocks lie in random order. Times are of the call as the engine makes it: cache write and attention.

With `--level`, each level runs in turn, and a figure's name ends with its level: decode_bf16_over_floor_avx512.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.lib.cpu_levels import add_level_flag, at_levels
from bench.lib.harness import parser, progress, report
from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionMetadata, LayerAttention
from gpuworker.attention.native_backend import NativeAttention, layer_struct, rows_struct
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.devices import CACHE_DTYPES, default_threads
from gpuworker.memory.kv_cache import KvCache
from gpuworker.native import library as native

CPU = torch.device("cpu")
BATCHES, CONTEXTS = (1, 8, 32), (256, 1024, 4096)
KV_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "int8": "int8"}
BLOCK_SIZE = 16
_ROTATED_BYTES = 160 << 20
_MAX_LAYERS = 128
_SECONDS = 0.3  # seconds of one measurement of Quire and the floor, at least
_ROUNDS = 8  # calls in a row of one contender


@dataclass(frozen=True)
class Heads:
    """Query heads, K/V heads and their size: 64 as in small models, 128 with groups of four as in most larger ones."""

    queries: int
    keys: int
    dim: int


HEADS = {64: Heads(12, 4, 64), 128: Heads(16, 4, 128)}


class Rows:
    """Rows (start, length) on scattered blocks, and a cache with enough layers to exceed the CPU's caches."""

    def __init__(self, heads: Heads, kv_dtype: str, rows: Iterable[tuple[int, int]], shared: int = 0) -> None:
        """`shared`: positions at the front that all rows have in common, on the same blocks."""
        start, length = np.array(list(rows), dtype=np.int32).T
        self.heads = heads
        self.kv_dtype = kv_dtype
        a_row = -(-int((start + length).max()) // BLOCK_SIZE)
        blocks = len(start) * a_row
        self.bytes = blocks * BLOCK_SIZE * heads.keys * 2 * heads.dim * CACHE_DTYPES[kv_dtype].itemsize
        self.layers = 2 * min(_MAX_LAYERS // 2, -(-_ROTATED_BYTES // (2 * self.bytes)))
        self.cache = KvCache(
            KvGeometry(self.layers, heads.keys, heads.dim, heads.dim, kv_dtype), blocks, BLOCK_SIZE, CPU
        )
        _fill(self.cache)
        table = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(len(start), a_row)
        table[:, : shared // BLOCK_SIZE] = table[0, : shared // BLOCK_SIZE]
        packed = pack_rows(start, length, table, BLOCK_SIZE)
        self.step: AttentionMetadata = attention_metadata(packed, to_device(attention_arrays(packed), CPU))
        dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
        tokens = self.step.num_tokens
        self.query = torch.randn(tokens, heads.queries, heads.dim).to(dtype)
        self.key, self.value = (torch.randn(tokens, heads.keys, heads.dim).to(dtype) for _ in range(2))

    def layer(self, index: int) -> LayerAttention:
        """Return the attention parameters of layer `index`, modulo the number of layers."""
        return LayerAttention(index % self.layers, self.heads.dim**-0.5)


def _fill(cache: KvCache) -> None:
    some = torch.randn(1 << 20)
    for pool, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        numbers = some if scales is None else some * 30
        for part in pool.view(-1).split(len(some)):
            part.copy_(numbers[: len(part)])
        if scales is not None:
            scales.fill_(1 / 30)


def native_calls(rows: Rows, library: ctypes.CDLL, threads: int, deterministic: bool = False) -> Callable[[int], None]:
    """Return the attention call of layer n, by the library's function alone: a step's model is C++ too."""
    attention = NativeAttention(rows.cache, deterministic, threads, library)
    attention.begin(rows.step)
    out = attention.write_and_attend(rows.layer(0), rows.query, rows.key, rows.value)  # plans the step
    layers = [layer_struct(rows.layer(index)) for index in range(rows.layers)]
    tensors = [rows_struct(tensor) for tensor in (rows.query, rows.key, rows.value, out)]
    held = (attention, out)

    def call(index: int) -> None:
        library.quire_attention_layer(held[0].plan, layers[index % rows.layers], *tensors)

    return call


def floor_calls(rows: Rows, library: ctypes.CDLL, threads: int) -> Callable[[int], None]:
    """Return a call that reads as many bytes as K and V of a layer have, from other memory: two layers of a pool."""
    elsewhere = KvCache(rows.cache.geometry, rows.cache.num_blocks, BLOCK_SIZE, CPU)
    _fill(elsewhere)
    parts = [
        pool[layer : layer + 2] for pool in (elsewhere.keys, elsewhere.values) for layer in range(0, rows.layers, 2)
    ]

    def call(index: int) -> None:
        part = parts[index % len(parts)]
        library.quire_read(part.data_ptr(), rows.bytes, threads)

    return call


def first_quartiles(calls: list[Callable[[int], None]], seconds: float = _SECONDS) -> list[float]:
    """Return the first quartile of the seconds of each call; the calls take turns."""
    taken: list[list[float]] = [[] for _ in calls]
    begun, index = time.perf_counter(), 0
    while index < 2 * _ROUNDS or time.perf_counter() - begun < seconds:
        for times, call in zip(taken, calls, strict=True):
            for offset in range(_ROUNDS):
                before = time.perf_counter()
                call(index + offset)
                times.append(time.perf_counter() - before)
        index += _ROUNDS
    return [statistics.quantiles(times, n=4)[0] for times in taken]


def geometric_mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def decodes(library: ctypes.CDLL, threads: int) -> dict[str, float]:
    """Return Quire over the floor for each type and head size, and the bandwidths of one case."""
    figures: dict[str, float] = {}
    for (short, kv_dtype), dim in itertools.product(KV_DTYPES.items(), HEADS):
        ratios = []
        for batch, context in itertools.product(BATCHES, CONTEXTS):
            progress(f"decode {short}, head_dim {dim}, batch {batch}, context {context}")
            rows = Rows(HEADS[dim], kv_dtype, [(context - 1, 1)] * batch)
            ours, floor = first_quartiles([native_calls(rows, library, threads), floor_calls(rows, library, threads)])
            ratios.append(ours / floor)
            figures[f"decode_{short}_d{dim}_b{batch}_c{context}_over_floor"] = ours / floor
            if (batch, context, short) == (8, 1024, "bf16"):
                figures[f"decode_bf16_d{dim}_GBps"] = rows.bytes / ours / 1e9
                figures[f"read_d{dim}_GBps"] = rows.bytes / floor / 1e9
        figures[f"decode_{short}_d{dim}_over_floor"] = geometric_mean(ratios)
    for short in KV_DTYPES:
        figures[f"decode_{short}_over_floor"] = geometric_mean(
            figures[f"decode_{short}_d{d}_over_floor"] for d in HEADS
        )
    return figures


def alternatives(library: ctypes.CDLL, threads: int) -> dict[str, float]:
    """Return Quire over gathering and torch's attention, and over torch's on contiguous K/V: 8 decodes at 1024."""
    figures: dict[str, float] = {}
    for short in ("bf16", "fp32"):
        progress(f"decode {short}, torch")
        rows = Rows(HEADS[64], KV_DTYPES[short], [(1023, 1)] * 8)
        gathers = TorchAttention(rows.cache)
        gathers.begin(rows.step)
        shape = (rows.layers, 8, rows.heads.keys, 1024, rows.heads.dim)
        keys, values = rows.cache.keys.view(shape), rows.cache.values.view(shape)

        def gathered(index: int, rows: Rows = rows, gathers: TorchAttention = gathers) -> None:
            gathers.write_and_attend(rows.layer(index), rows.query, rows.key, rows.value)

        def contiguous(index: int, rows: Rows = rows, keys: torch.Tensor = keys, values: torch.Tensor = values) -> None:
            layer = index % rows.layers
            scaled_dot_product_attention(rows.query[:, :, None], keys[layer], values[layer], enable_gqa=True)

        ours, gather, sdpa = first_quartiles([native_calls(rows, library, threads), gathered, contiguous], 1.0)
        figures |= {f"decode_{short}_over_gather": ours / gather, f"decode_{short}_over_contiguous": ours / sdpa}
    return figures


def prefills(library: ctypes.CDLL, threads: int) -> dict[str, float]:
    """Return Quire over torch's dense causal attention on contiguous q, k, v, for prompts of 512 and 2048."""
    figures: dict[str, float] = {}
    for (short, kv_dtype), dim in itertools.product(KV_DTYPES.items(), HEADS):
        ratios = []
        for count in (512, 2048):
            progress(f"prefill {short}, head_dim {dim}, {count} tokens")
            rows = Rows(HEADS[dim], kv_dtype, [(0, count)])
            dense = [tensor.transpose(0, 1)[None].contiguous() for tensor in (rows.query, rows.key, rows.value)]

            def sdpa(_: int, dense: list[torch.Tensor] = dense) -> None:
                scaled_dot_product_attention(dense[0], dense[1], dense[2], is_causal=True, enable_gqa=True)

            ours, theirs = first_quartiles([native_calls(rows, library, threads), sdpa], 0.2)
            ratios.append(ours / theirs)
            if (dim, count) == (128, 2048):
                flops = 2 * count**2 * dim * HEADS[dim].queries
                figures[f"prefill_{short}_GFLOPps"] = flops / ours / 1e9
        figures[f"prefill_{short}_d{dim}_over_dense"] = geometric_mean(ratios)
    return figures


def modes(library: ctypes.CDLL, threads: int) -> dict[str, float]:
    """Return the gain of sharing a prefix, and the cost of the same bits in every batch."""
    progress("shared prefix, deterministic")
    apart, shared = (Rows(HEADS[64], "bfloat16", [(2047 + 64, 1)] * 32, shared) for shared in (0, 2048))
    alone, together = first_quartiles([native_calls(rows, library, threads) for rows in (apart, shared)])
    costs = {}
    for name, batch in (("decode", [(1023, 1)] * 8), ("prefill", [(0, 1024)])):
        # Each has a cache of its own: otherwise one would find in the CPU's caches what the other has just read.
        calls = [native_calls(Rows(HEADS[64], "bfloat16", batch), library, threads, bits) for bits in (False, True)]
        plain, fixed = first_quartiles(calls)
        costs[f"deterministic_{name}_over_plain"] = fixed / plain
    return {"shared_prefix_speedup": alone / together} | costs


NOTES = {
    "decode_bf16_over_floor": "time over reading K and V: mean of batch 1, 8, 32 x context 256, 1024, 4096 x d 64, 128",
    "decode_fp32_over_floor": "the same, K and V in float32",
    "decode_int8_over_floor": "the same, K and V in int8, over reading those bytes",
    "decode_bf16_over_gather": "over torch: gather of the blocks, then its attention in float32; 8 x 1024, d 64",
    "decode_bf16_over_contiguous": "over torch's attention on contiguous K and V, as if no cache were paged",
    "prefill_fp32_d64_over_dense": "over torch's causal attention on contiguous q, k, v; mean of 512 and 2048 tokens",
    "shared_prefix_speedup": "32 decodes behind one prefix of 2048: on blocks of their own over on shared ones",
    "deterministic_decode_over_plain": "what the same bits in every batch cost",
}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--threads", type=int, default=default_threads(), help="default: as the engine")
    flags.add_argument("--details", action="store_true", help="show each batch and context too")
    add_level_flag(flags)
    options = flags.parse_args()
    if at_levels("cpu_attention", options, NOTES):
        return
    library = native.best()
    if library is None:
        raise SystemExit("the native library was not built")
    torch.set_num_threads(options.threads)
    figures = {"threads": float(options.threads)}
    for part in (decodes, alternatives, prefills, modes):
        figures |= part(library, options.threads)
    progress("", end=True)
    if not options.details:
        figures = {name: value for name, value in figures.items() if not re.search(r"_b\d+_c\d+_", name)}
    report("cpu_attention", figures, NOTES, options.json)


if __name__ == "__main__":
    main()
