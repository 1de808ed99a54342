"""Attention over a paged cache in float64 by plain loops: the truth that every backend is held to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.types import KvGeometry
from gpuworker.attention import AttentionMetadata, LayerAttention
from gpuworker.kv_cache import KvCache
from gpuworker.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device

Float64Array = npt.NDArray[np.float64]
CPU = torch.device("cpu")
BLOCKS_A_ROW = 12


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

    @property
    def geometry(self) -> KvGeometry:
        return KvGeometry(self.layers, self.num_kv_heads, self.head_dim_k, self.head_dim_v, "float32")

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
    cache.keys.fill_(1e4)
    cache.values.fill_(1e4)
    table = np.random.default_rng(seed).permutation(len(case.rows) * BLOCKS_A_ROW).astype(np.int32) + 1
    table = table.reshape(len(case.rows), BLOCKS_A_ROW)
    past = []
    for row, (start, _) in enumerate(case.rows):
        keys = torch.randn((case.layers, start, case.num_kv_heads, case.head_dim_k), generator=draw)
        values = torch.randn((case.layers, start, case.num_kv_heads, case.head_dim_v), generator=draw)
        for position in range(start):
            block, offset = table[row, position // case.block_size], position % case.block_size
            cache.keys[:, block, :, offset] = keys[:, position]
            cache.values[:, block, :, offset] = values[:, position]
        past.append((keys, values))
    start_length = np.array(case.rows, dtype=np.int32)
    rows = pack_rows(start_length[:, 0], start_length[:, 1], table, case.block_size)
    metadata = attention_metadata(rows, to_device(attention_arrays(rows), CPU))
    query = torch.randn((case.tokens, case.num_heads, case.head_dim_k), generator=draw)
    key = torch.randn((case.tokens, case.num_kv_heads, case.head_dim_k), generator=draw)
    value = torch.randn((case.tokens, case.num_kv_heads, case.head_dim_v), generator=draw)
    return Step(case, cache, metadata, query, key, value, past)


def reference(step: Step, layer: LayerAttention) -> Float64Array:
    """Return [T, num_heads, head_dim_v]."""
    case, parts, begin = step.case, [], 0
    for (start, length), (past_keys, past_values) in zip(step.case.rows, step.past, strict=True):
        now = slice(begin, begin + length)
        keys = torch.cat((past_keys[layer.layer], step.key[now])).double().numpy()
        values = torch.cat((past_values[layer.layer], step.value[now])).double().numpy()
        for n, query in enumerate(step.query[now].double().numpy()):
            parts.append(_one_query(layer, query, keys[: start + n + 1], values[: start + n + 1]))
        begin += length
    return np.stack(parts).reshape(case.tokens, case.num_heads, case.head_dim_v)


def _one_query(layer: LayerAttention, query: Float64Array, keys: Float64Array, values: Float64Array) -> Float64Array:
    """Attend from one position, [num_heads, d], over the keys up to it, [n, kv_heads, d]."""
    first = 0 if layer.window is None else max(0, len(keys) - layer.window)
    group = len(query) // keys.shape[1]
    out = []
    for head, one in enumerate(query):
        scores = keys[first:, head // group] @ one * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        weights = np.exp(scores)
        sink = 0.0 if layer.sinks is None else np.exp(layer.sinks[head].double().item())
        out.append(weights @ values[first:, head // group] / (weights.sum() + sink))
    return np.stack(out)
