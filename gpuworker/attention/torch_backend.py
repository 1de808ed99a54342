"""Attention and cache write in plain torch, for any device: gather each row's K/V, then attend in float32.

This backend is the reference of the others and the fallback where none of them runs. Decodes of similar context length
attend as one batch; each prefill attends alone. Queries of the heads that share a K/V head are stacked: K/V is never
repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpuworker.attention.interface import AttentionMetadata, Int32Array, LayerAttention
from gpuworker.memory.kv_cache import KvCache

Int64Array = npt.NDArray[np.int64]

# Decodes are padded to the longest row of their batch: at most a quarter of what it gathers, or this many slots a row.
_PADDING_FRACTION, _PADDING_SLOTS = 0.25, 32
# A batch of decodes gathers this much of K at most, so that it is still in the core's cache when read.
_GATHERED_BYTES = 1 << 20
# Scores held at once where the whole matrix is needed (softcap, sinks): 16 M floats are 64 MB.
_MAX_SCORES = 16 << 20
# Entries of the mask of a batch: a longer prefill attends in parts.
MAX_MASK = 16 << 20


@dataclass(frozen=True, slots=True)
class View:
    """What a batch gathers for one window or chunk: L slots a row."""

    blocks: torch.Tensor  # [rows * kv_heads * blocks a row], index into (block, head)
    mask: torch.Tensor | None  # [rows, 1, queries, L], True where a query sees a slot; None: causal from slot 0


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows with equally many queries that attend together; views are made when a layer first asks for its reach."""

    rows: Int64Array
    context: Int64Array  # per row, positions up to its last query in this batch
    queries: slice  # tokens of the step, in the order in which rows attend
    query_count: int
    views: dict[tuple[int | None, int | None], View] = field(default_factory=dict)


class TorchAttention:
    """Gather and attend. Implements `gpuworker.attention.interface.AttentionBackend`."""

    def __init__(self, cache: KvCache) -> None:
        self._block_size = cache.block_size
        self._kv_heads = cache.geometry.num_kv_heads
        self._slots_at_once = _GATHERED_BYTES // (4 * self._kv_heads * cache.geometry.head_dim_k)
        self._device = cache.keys.device
        self._keys, self._head_dim_v = _Pool(cache.keys, cache.key_scales), cache.geometry.head_dim_v
        self._values = None if cache.geometry.values_in_keys else _Pool(cache.values, cache.value_scales)

    def begin(self, step: AttentionMetadata) -> None:
        """Find the slots to write and the rows that attend together."""
        self._step = step
        self.place(step.slot_mapping)
        order, self._batches = _batches(step, self._slots_at_once)
        self._permutation = None
        if order is not None:
            tokens = np.arange(step.num_tokens)
            tokens[: step.num_decodes] = order
            self._permutation = torch.from_numpy(tokens).to(self._device)

    def place(self, slots: Int32Array) -> None:
        """Say where `write` writes: into slots [T]."""
        self._writes = self._slots_by_head(slots)

    def write(self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key and value [T, kv_heads, d] of a layer without a source."""
        if layer.source is None:
            self._keys.write(layer.layer, self._writes, key.reshape(-1, key.shape[-1]))
        if layer.source is None and self._values is not None:
            self._values.write(layer.layer, self._writes, value.reshape(-1, value.shape[-1]))

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.write(layer, key, value)
        if self._permutation is not None:
            query = query.index_select(0, self._permutation)
            if layer.indices is not None:
                layer = replace(layer, indices=layer.indices.index_select(0, self._permutation))
        parts = [self._attend(layer, query[batch.queries], batch) for batch in self._batches]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self._permutation is None else torch.empty_like(out).index_copy_(0, self._permutation, out)

    def _attend(self, layer: LayerAttention, query: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """Return [tokens of the batch, num_heads, head_dim_v] for the same tokens of `query`."""
        reach = layer.window, layer.chunk
        if reach not in batch.views:
            batch.views[reach] = self._view(batch, layer)
        view, rows = batch.views[reach], len(batch.rows)
        shape = (rows, self._kv_heads, -1)
        keys = self._keys.read(layer.kept_at, view.blocks).view(*shape, self._keys.head_dim)
        if self._values is None:
            values = keys[..., : self._head_dim_v]
        else:
            values = self._values.read(layer.kept_at, view.blocks).view(*shape, self._head_dim_v)
        # [tokens, heads, d] -> [rows, kv_heads, group, queries, d]
        stacked = query.reshape(rows, batch.query_count, self._kv_heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4)
        mask = view.mask
        if layer.indices is not None:
            chosen = layer.indices[batch.queries].view(rows, 1, batch.query_count, -1)
            position = torch.arange(keys.shape[2], device=self._device)
            seen = _sees(position[: batch.query_count, None], position, layer) if mask is None else mask
            mask = seen & _kept(chosen, keys.shape[2])
        out = _attend_stacked(layer, stacked.float(), keys, values, mask)
        return out.permute(0, 3, 1, 2, 4).reshape(*query.shape[:2], -1).to(query.dtype)

    def _slots_by_head(self, slots: Int32Array) -> torch.Tensor:
        """Return [T * kv_heads]: where in the flat pools the heads of each token go."""
        block, offset = np.divmod(slots.astype(np.int64), self._block_size)
        heads = block[:, None] * self._kv_heads + np.arange(self._kv_heads)
        return torch.from_numpy((heads * self._block_size + offset[:, None]).ravel()).to(self._device)

    def _view(self, batch: RowBatch, layer: LayerAttention) -> View:
        """Return what the batch gathers for a layer: the blocks that any of its queries sees, and the mask."""
        context, start = batch.context, batch.context - batch.query_count
        first_block = np.maximum(layer.first_seen(start), 0) // self._block_size
        count = int((-(-context // self._block_size) - first_block).max())
        index = self._gather_index(batch.rows, first_block, count)
        whole = len(batch.rows) == 1 and start[0] == 0 and batch.query_count > 1
        if whole and layer.first_seen(context - 1)[0] <= 0:
            return View(index, None)
        slots = first_block[:, None] * self._block_size + np.arange(count * self._block_size)
        return View(index, self._mask(slots, start[:, None] + np.arange(batch.query_count), layer))

    def _gather_index(self, rows: Int64Array, first_block: Int64Array, count: int) -> torch.Tensor:
        """Return [rows * kv_heads * count]: rows of the blocked pools, `count` blocks from the first of each row.

        A row of fewer blocks has its last one again: what else its table says may hold anything, numbers or not.
        """
        table = self._step.block_table[rows]
        last = -(-self._step.context_len[rows] // self._block_size) - 1
        columns = np.minimum(first_block[:, None] + np.arange(count), last[:, None])
        blocks = np.take_along_axis(table, columns, axis=1).astype(np.int64)
        by_head = blocks[:, None] * self._kv_heads + np.arange(self._kv_heads)[:, None]
        return torch.from_numpy(by_head.ravel()).to(self._device)

    def _mask(self, slots: Int64Array, positions: Int64Array, layer: LayerAttention) -> torch.Tensor:
        """Return [rows, 1, queries, L] for the positions of slots [rows, L] and of queries [rows, queries]."""
        at = torch.from_numpy(slots).to(self._device)[:, None, None]
        query = torch.from_numpy(positions).to(self._device)[:, None, :, None]
        return _sees(query, at, layer)


class _Pool:
    """K or V of all layers, written by (slot, head) and read by (block, head) in float32.

    Written values are finite, so that a masked slot adds nothing to the result: 0 * inf is not 0.
    """

    def __init__(self, pool: torch.Tensor, scales: torch.Tensor | None) -> None:
        self.head_dim = pool.shape[-1]
        self._dtype = pool.dtype
        stored = pool if scales is None else pool.view(torch.int8)  # fp8 has neither index_copy_ nor index_select
        self._flat = stored.flatten(1, 3)  # [layer, slot of a head, d]
        self._blocked = stored.flatten(1, 2)  # [layer, head of a block, block_size, d]
        self._flat_scales = None if scales is None else scales.flatten(1, 3)
        self._blocked_scales = None if scales is None else scales.flatten(1, 2)

    def write(self, layer: int, at: torch.Tensor, new: torch.Tensor) -> None:
        """Write rows [n, d] at indices [n]; a quantised one gets the scale that makes its largest number the type's."""
        if self._flat_scales is None:
            self._flat[layer].index_copy_(0, at, new.to(self._dtype).nan_to_num())
            return
        limits = torch.finfo(self._dtype) if self._dtype.is_floating_point else torch.iinfo(self._dtype)
        numbers = new.float().nan_to_num()
        scales = (numbers.abs().amax(dim=-1) / limits.max).clamp_min(torch.finfo(torch.float32).tiny)
        steps = numbers / scales[:, None]
        stored = (steps if self._dtype.is_floating_point else steps.round()).clamp(-limits.max, limits.max)
        self._flat[layer].index_copy_(0, at, stored.to(self._dtype).view(torch.int8))
        self._flat_scales[layer].index_copy_(0, at, scales)

    def read(self, layer: int, at: torch.Tensor) -> torch.Tensor:
        """Return [n, block_size, d] for indices [n]."""
        found = self._blocked[layer].index_select(0, at)
        if self._blocked_scales is None:
            return found.float()
        return found.view(self._dtype).float() * self._blocked_scales[layer].index_select(0, at)[..., None]


def attend_packed(layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend over one whole sequence that is in no cache. Shapes as in `AttentionBackend.write_and_attend`."""
    count, kv_heads = key.shape[:2]
    position = torch.arange(count, device=key.device)
    mask = _sees(position[:, None], position, layer)[None, None]
    if layer.indices is not None:
        mask = mask & _kept(layer.indices, count)
    keys, values = (t.transpose(0, 1)[None].float() for t in (key, value))
    stacked = query.reshape(1, count, kv_heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4).float()
    out = _attend_stacked(layer, stacked, keys, values, mask)
    return out.permute(0, 3, 1, 2, 4).reshape(*query.shape[:2], -1).to(query.dtype)


def _sees(query: torch.Tensor, at: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
    """Return which positions a query sees: its own and those before it, inside its window or chunk."""
    seen = at <= query
    return seen if layer.window is None and layer.chunk is None else seen & (at >= layer.first_seen(query))


def _kept(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Return which of `count` positions [..., queries, count] are among those of indices [..., queries, n]."""
    inside = torch.where((indices < 0) | (indices > count), count, indices).long()
    kept = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    return kept.scatter_(-1, inside, True)[..., :count]


def _batches(step: AttentionMetadata, slots_at_once: int) -> tuple[Int64Array | None, list[RowBatch]]:
    """Return the order in which decodes attend (None: as they stand) and the batches, decodes first.

    Batches are cut from decodes sorted by length; inside a batch rows stand as in the step, so that rows of one length
    need no reordering.
    """
    decodes = step.num_decodes
    order = np.argsort(step.context_len[:decodes], kind="stable")
    sorted_lengths = step.context_len[order]
    cuts, end = [decodes], decodes
    while end > 0:
        longest = int(sorted_lengths[end - 1])
        shortest = min(longest * (1 - _PADDING_FRACTION), longest - _PADDING_SLOTS)
        similar = int(np.searchsorted(sorted_lengths[:end], shortest))
        end = max(similar, end - max(1, slots_at_once // longest))
        cuts.append(end)
    batches = []
    for begin, end in zip(cuts[:0:-1], cuts[-2::-1], strict=True):
        order[begin:end].sort()
        rows = order[begin:end]
        batches.append(RowBatch(rows, step.context_len[rows].astype(np.int64), slice(begin, end), 1))
    for row in range(decodes, step.num_rows):
        batches += _prefill_batches(step, row)
    return (None if (order[:-1] < order[1:]).all() else order), batches


def _prefill_batches(step: AttentionMetadata, row: int) -> Iterator[RowBatch]:
    """Yield the parts in which a prefill attends: mostly one."""
    context = int(step.context_len[row])
    first, last = int(step.query_start[row]), int(step.query_start[row + 1])
    at_once = max(1, MAX_MASK // context)
    for begin in range(first, last, at_once):
        end = min(begin + at_once, last)
        yield RowBatch(np.array([row]), np.array([context - (last - end)]), slice(begin, end), end - begin)


def _attend_stacked(
    layer: LayerAttention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend in float32. query [rows, kv_heads, group, queries, d], keys and values [rows, kv_heads, L, d]."""
    if mask is None:
        count = query.shape[3]
        keys, values = keys[:, :, :count], values[:, :, :count]
    if layer.softcap is None and layer.sinks is None:
        return _fused(layer, query, keys, values, mask)
    if mask is None:
        mask = torch.ones((1, 1, count, count), dtype=torch.bool, device=query.device).tril()
    return _explicit(layer, query, keys, values, mask)


def _fused(
    layer: LayerAttention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend with torch's own kernel; without a mask, causally."""
    if query.shape[3] == 1:
        out = scaled_dot_product_attention(query[..., 0, :], keys, values, mask, scale=layer.scale)
        return out[..., None, :]
    heads = query.flatten(1, 2)
    out = scaled_dot_product_attention(
        heads, keys, values, mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True
    )
    return out.view(*query.shape[:4], -1)


def _explicit(
    layer: LayerAttention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attend with explicit scores: the fused kernel supports neither softcap nor sinks."""
    rows, kv_heads, group, count, _ = query.shape
    at_once = max(1, _MAX_SCORES // (rows * kv_heads * group * keys.shape[2]))
    parts = []
    for begin in range(0, count, at_once):
        part = slice(begin, begin + at_once)
        scores = torch.matmul(query[..., part, :], keys[:, :, None].mT) * layer.scale
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores.masked_fill(~mask[:, :, None, part], float("-inf"))
        if layer.sinks is not None:
            sink = layer.sinks.float().view(1, kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        parts.append(torch.matmul(scores.softmax(dim=-1)[..., : keys.shape[2]], values[:, :, None]))
    return torch.cat(parts, dim=-2)
