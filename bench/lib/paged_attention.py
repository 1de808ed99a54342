"""Attention over a paged cache against attention over contiguous K/V: the cost of paging, and the gain of the kernel.

`scattered` is the time on blocks in random order over that on blocks in sequence: the cost of paging alone.
`contiguous` is that on blocks in random order over torch's attention on one contiguous tensor a sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from bench.lib.rates import fastest_in_turns
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, LayerAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache

HEADS, KV_HEADS, HEAD_DIM = 12, 4, 64
LAYERS = 4
"""Layers of K/V that are read in turns, so that no cache of the processor holds the next layer."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of `context` positions, of which the last `queries` attend."""

    rows: int
    queries: int
    context: int


DECODE = Shape(rows=32, queries=1, context=1024)
PREFILL = Shape(rows=1, queries=1024, context=1024)


def paged(shape: Shape, dtype: str, block_size: int, scattered: bool) -> Callable[[], None]:
    """Return a function that attends once, in each layer, over blocks in random order or in sequence."""
    columns = -(-shape.context // block_size)
    order = list(range(shape.rows * columns))
    if scattered:
        random.Random(0).shuffle(order)
    table = np.array(order, dtype=np.int32).reshape(shape.rows, columns)
    cache = KvCache(KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM, dtype), len(order), block_size, _CPU)
    for pool in (cache.keys, cache.values):
        pool.normal_()
    backend = make_backend("auto", cache)
    start = np.full(shape.rows, shape.context - shape.queries, dtype=np.int32)
    rows = pack_rows(start, np.full(shape.rows, shape.queries, dtype=np.int32), table, block_size)
    step = attention_metadata(rows, to_device(attention_arrays(rows), _CPU))
    tokens, number = shape.rows * shape.queries, getattr(torch, dtype)
    query = torch.randn(tokens, HEADS, HEAD_DIM).to(number)
    key, value = (torch.randn(tokens, KV_HEADS, HEAD_DIM).to(number) for _ in range(2))
    return lambda: _attend(backend, step, query, key, value)


@torch.inference_mode()
def _attend(
    backend: AttentionBackend, step: AttentionMetadata, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    backend.begin(step)
    for layer in range(LAYERS):
        backend.write_and_attend(LayerAttention(layer, HEAD_DIM**-0.5), query, key, value)


def contiguous(shape: Shape, dtype: str) -> Callable[[], None]:
    """Return a function that attends once, in each layer, by torch over contiguous K/V; nothing is written."""
    number = getattr(torch, dtype)
    query = torch.randn(shape.rows, HEADS, shape.queries, HEAD_DIM).to(number)
    keys, values = (
        [torch.randn(shape.rows, KV_HEADS, shape.context, HEAD_DIM).to(number) for _ in range(LAYERS)] for _ in range(2)
    )

    @torch.inference_mode()
    def attend() -> None:
        for key, value in zip(keys, values, strict=True):
            functional.scaled_dot_product_attention(query, key, value, is_causal=shape.queries > 1, enable_gqa=True)

    return attend


def measure(dtype: str, block_size: int, threads: int) -> dict[str, float]:
    """Return the ratios of one type, for decode and prefill."""
    torch.set_num_threads(threads)
    found = {}
    for name, shape in (("decode", DECODE), ("prefill", PREFILL)):
        random_order, in_sequence, by_torch = fastest_in_turns(
            paged(shape, dtype, block_size, scattered=True),
            paged(shape, dtype, block_size, scattered=False),
            contiguous(shape, dtype),
        )
        found[f"paged_over_contiguous_{name}"] = random_order / by_torch
        found[f"scattered_over_sequential_{name}"] = random_order / in_sequence
    return found


NOTES = {
    "paged_over_contiguous_decode": f"attention, {DECODE.rows} decodes at {DECODE.context}: ours over torch's",
    "paged_over_contiguous_prefill": f"the same, a prefill of {PREFILL.context}",
    "scattered_over_sequential_decode": "ours, blocks in random order over blocks in sequence: decode",
    "scattered_over_sequential_prefill": "the same: prefill",
}
