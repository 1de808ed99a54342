"""Attention steps on a GPU: caches of random K/V on scattered blocks, and the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionMetadata, Int32Array, LayerAttention
from gpuworker.attention.step_inputs import PackedRows, attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, K/V heads and head size of a model, and the type of queries."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


LLAMA_8B = Heads()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a step: row r computes positions context[r] - queries[r] .. context[r] - 1.

    The first `shared` positions (whole blocks) of all rows lie in the same blocks.
    """

    context: tuple[int, ...]
    queries: tuple[int, ...]
    shared: int = 0
    block_size: int = 16

    @staticmethod
    def decodes(batch: int, context: int, shared: int = 0, block_size: int = 16) -> Rows:
        """Return equally long rows of one query each."""
        return Rows((context,) * batch, (1,) * batch, shared, block_size)

    def block_table(self, seed: int = 0) -> tuple[Int32Array, int]:
        """Return [R, max_blocks], in random order, and how many blocks the pool needs."""
        width, common = -(-max(self.context) // self.block_size), self.shared // self.block_size
        own = width - common
        blocks = np.random.default_rng(seed).permutation(common + len(self.context) * own).astype(np.int32)
        prefix = np.tile(blocks[:common], (len(self.context), 1))
        return np.concatenate((prefix, blocks[common:].reshape(-1, own)), axis=1), len(blocks)


@dataclass(frozen=True, slots=True)
class Case:
    """A step on the device: its cache with one or more layers alike, its queries, and new K and V for each token."""

    heads: Heads
    rows: Rows
    cache: KvCache
    packed: PackedRows
    metadata: AttentionMetadata
    query: torch.Tensor  # [T, num_heads, head_dim]

    @property
    def read_bytes(self) -> int:
        """K, V and scales of all contexts in one layer; shared positions count once for each row."""
        geometry = self.cache.geometry
        return sum(self.rows.context) * bytes_per_block(geometry, 1) // geometry.num_layers

    def layer(self, index: int = 0, window: int | None = None, softcap: float | None = None) -> LayerAttention:
        return LayerAttention(index % self.cache.geometry.num_layers, self.heads.scale, window, softcap)


def make_case(heads: Heads, rows: Rows, kv_dtype: str, device: torch.device, layers: int = 1) -> Case:
    """Return a step whose K and V are random, those of its own tokens included."""
    table, num_blocks = rows.block_table()
    geometry = KvGeometry(layers, heads.num_kv_heads, heads.head_dim, heads.head_dim, kv_dtype)
    cache = KvCache(geometry, num_blocks, rows.block_size, device)
    _fill(cache)
    length = np.array(rows.queries, dtype=np.int32)
    packed = pack_rows(np.array(rows.context, dtype=np.int32) - length, length, table, rows.block_size)
    metadata = attention_metadata(packed, to_device(attention_arrays(packed), device))
    query = torch.randn((metadata.num_tokens, heads.num_heads, heads.head_dim), device=device).to(heads.dtype)
    return Case(heads, rows, cache, packed, metadata, query)


def _fill(cache: KvCache) -> None:
    """Fill the pools with normal numbers; in a quantised cache, as its integers or small floats and one scale."""
    for pool, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        for layer in pool:  # the float32 in between is as large as one layer
            numbers = torch.randn(layer.shape, device=layer.device)
            if scales is None:
                layer.copy_(numbers)
            elif layer.dtype == torch.int8:
                layer.copy_((numbers * 32).round().clamp(-127, 127))
            else:
                layer.copy_((numbers * 32).clamp(-448, 448).to(layer.dtype))
        if scales is not None:
            scales.fill_(1 / 32)


def reference(case: Case, layer: LayerAttention) -> torch.Tensor:
    """Return the attention, [T, num_heads, head_dim] float64: the formula, row by row."""
    outs = []
    for row in range(case.metadata.num_rows):
        begin, end = (int(case.packed.query_start[row + n]) for n in range(2))
        context = int(case.packed.context_len[row])
        keys, values = (_gathered(case, pool, layer.layer, row, context) for pool in ("keys", "values"))
        group = case.heads.num_heads // case.heads.num_kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)  # [H, L, d]
        scores = torch.einsum("thd,hld->htl", case.query[begin:end].double(), keys) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        position = torch.arange(context - (end - begin), context, device=keys.device)[:, None]
        at = torch.arange(context, device=keys.device)
        seen = (at <= position) & (at > position - (layer.window or math.inf))
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        outs.append(torch.einsum("htl,hld->thd", weights, values))
    return torch.cat(outs)


def _gathered(case: Case, pool: str, layer: int, row: int, context: int) -> torch.Tensor:
    """Return K or V of a row's context as float64 [kv_heads, L, head_dim]."""
    cache = case.cache
    blocks = torch.from_numpy(case.packed.block_table[row].astype(np.int64)).to(cache.keys.device)
    pools, scales = (cache.keys, cache.key_scales) if pool == "keys" else (cache.values, cache.value_scales)
    held = pools[layer][blocks].double()  # [blocks, kv_heads, block_size, d]
    if scales is not None:
        held *= scales[layer][blocks].double()[..., None]
    return held.transpose(0, 1).flatten(1, 2)[:, :context]
