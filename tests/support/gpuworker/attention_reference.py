"""Attention over a paged cache in float64 by plain loops: the truth that every backend is held to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionMetadata, LayerAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.devices import CACHE_DTYPES, QUANTISED_DTYPES
from gpuworker.memory.kv_cache import KvCache

Float64Array = npt.NDArray[np.float64]
CPU = torch.device("cpu")
BLOCKS_A_ROW = 12
# Rows around the borders of chunks of 12: decodes on the last and first positions of one; prefills of exactly one, over
# one border, over several, and inside of one.
AROUND_CHUNKS = ((11, 1), (12, 1), (23, 1), (24, 1), (30, 1), (0, 1), (0, 12), (12, 12), (7, 9), (13, 30), (24, 5))


@dataclass(frozen=True)
class Case:
    """Rows as (start, length), decodes first, and the shape of heads."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim_k: int = 8
    head_dim_v: int = 8
    layers: int = 2
    values_in_keys: bool = False

    @property
    def geometry(self) -> KvGeometry:
        sizes = (self.layers, self.num_kv_heads, self.head_dim_k, self.head_dim_v)
        return KvGeometry(*sizes, "float32", values_in_keys=self.values_in_keys)

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.rows)


@dataclass(frozen=True)
class Step:
    """A case with numbers: a cache that holds what stands before each row, and the step's q, k and v."""

    case: Case
    cache: KvCache
    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    past: list[tuple[torch.Tensor, torch.Tensor]]  # per row: K and V [layers, start, kv_heads, d] before the step


def random_step(case: Case, seed: int = 0) -> Step:
    """Fill a cache with random pasts on scattered blocks; slots that hold nothing are poisoned with a large number."""
    draw = torch.Generator().manual_seed(seed)
    cache = KvCache(case.geometry, len(case.rows) * BLOCKS_A_ROW + 1, case.block_size, CPU)
    for pool in cache.pools:
        pool.fill_(1e4)
    table = np.random.default_rng(seed).permutation(len(case.rows) * BLOCKS_A_ROW).astype(np.int32) + 1
    table = table.reshape(len(case.rows), BLOCKS_A_ROW)
    past = []
    for start, _ in case.rows:
        keys = torch.randn((case.layers, start, case.num_kv_heads, case.head_dim_k), generator=draw)
        values = torch.randn((case.layers, start, case.num_kv_heads, case.head_dim_v), generator=draw)
        past.append((keys, keys[..., : case.head_dim_v] if case.values_in_keys else values))
    for pool, numbers in ((cache.keys, [keys for keys, _ in past]), (cache.values, [values for _, values in past])):
        _fill(pool, None, table, numbers)
    start_length = np.array(case.rows, dtype=np.int32)
    rows = pack_rows(start_length[:, 0], start_length[:, 1], table, case.block_size)
    metadata = attention_metadata(rows, to_device(attention_arrays(rows), CPU))
    query = torch.randn((case.tokens, case.num_heads, case.head_dim_k), generator=draw)
    key = torch.randn((case.tokens, case.num_kv_heads, case.head_dim_k), generator=draw)
    value = torch.randn((case.tokens, case.num_kv_heads, case.head_dim_v), generator=draw)
    if case.values_in_keys:
        value = key[..., : case.head_dim_v]
    return Step(case, cache, metadata, query, key, value, past)


def in_type(step: Step, kv_dtype: str) -> Step:
    """Return the step on a cache of this type, with all its K and V rounded to what the type can hold."""
    case = step.case
    cache = KvCache(replace(case.geometry, dtype=kv_dtype), step.cache.num_blocks, case.block_size, CPU)
    past = [_both_kept(case, keys, values, kv_dtype) for keys, values in step.past]
    for pool, scales, which in ((cache.values, cache.value_scales, 1), (cache.keys, cache.key_scales, 0)):
        if not (which and case.values_in_keys):
            pool.view(torch.uint8).fill_(0x44)  # a finite number in every type
            if scales is not None:
                scales.fill_(1e4)
            _fill(pool, scales, step.metadata.block_table, [numbers[which] for numbers in step.past])
    key, value = _both_kept(case, step.key, step.value, kv_dtype)
    return replace(step, cache=cache, past=past, key=key, value=value)


def _both_kept(
    case: Case, keys: torch.Tensor, values: torch.Tensor, kv_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as the cache gives them back: V by the scale of K where it is a prefix of it."""
    found = kept(keys, kv_dtype)[0]
    return found, found[..., : case.head_dim_v] if case.values_in_keys else kept(values, kv_dtype)[0]


def kept(numbers: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [..., d] as a cache of this type gives it back, in float32; then what it stores, and the scales [...]."""
    dtype = CACHE_DTYPES[kv_dtype]
    if kv_dtype not in QUANTISED_DTYPES:
        stored = numbers.to(dtype)
        return stored.float(), stored, torch.ones(numbers.shape[:-1])
    largest = 127.0 if kv_dtype == "int8" else 448.0
    scales = numbers.abs().amax(dim=-1) / largest
    steps = numbers / scales.clamp_min(1e-30)[..., None]
    stored = (steps.round() if kv_dtype == "int8" else steps).to(dtype)
    return stored.float() * scales[..., None], stored, scales


def _fill(
    pool: torch.Tensor, scales: torch.Tensor | None, table: npt.NDArray[np.int32], past: list[torch.Tensor]
) -> None:
    """Write per row [layers, start, kv_heads, d] into the row's blocks."""
    kv_dtype = next(name for name, dtype in CACHE_DTYPES.items() if dtype == pool.dtype)
    size = pool.shape[3]
    for row, numbers in enumerate(past):
        _, stored, steps = kept(numbers, kv_dtype)
        for position in range(numbers.shape[1]):
            at = (slice(None), int(table[row, position // size]), slice(None), position % size)
            pool[at] = stored[:, position]
            if scales is not None:
                scales[at] = steps[:, position]


def reference(step: Step, layer: LayerAttention) -> Float64Array:
    """Return [T, num_heads, head_dim_v]."""
    case, parts, begin = step.case, [], 0
    for (start, length), (past_keys, past_values) in zip(step.case.rows, step.past, strict=True):
        now = slice(begin, begin + length)
        keys = torch.cat((past_keys[layer.layer], step.key[now])).double().numpy()
        values = torch.cat((past_values[layer.layer], step.value[now])).double().numpy()
        for n, query in enumerate(step.query[now].double().numpy()):
            kept = list(range(start + n + 1))
            if layer.indices is not None:
                kept = [each for each in kept if each in layer.indices[begin + n].tolist()]
            parts.append(_one_query(layer, query, keys[kept], values[kept]))
        begin += length
    return np.stack(parts).reshape(case.tokens, case.num_heads, case.head_dim_v)


def _one_query(layer: LayerAttention, query: Float64Array, keys: Float64Array, values: Float64Array) -> Float64Array:
    """Attend from one position, [num_heads, d], over the keys up to it, [n, kv_heads, d]."""
    position, first = len(keys) - 1, 0
    if layer.window is not None:
        first = max(0, position - layer.window + 1)
    if layer.chunk is not None:
        first = position - position % layer.chunk
    group = len(query) // keys.shape[1]
    out = []
    for head, one in enumerate(query):
        scores = keys[first:, head // group] @ one * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        weights = np.exp(scores - scores.max())
        sink = 0.0 if layer.sinks is None else np.exp(layer.sinks[head].double().item() - scores.max())
        out.append(weights @ values[first:, head // group] / (weights.sum() + sink))
    return np.stack(out)
