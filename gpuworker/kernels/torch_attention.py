"""Attention and cache write in plain torch, for any device: gather each row's K/V, then attend in float32.

The oracle of the other backends and the fallback where none of them runs. Decodes of similar context length attend as one
batch; each prefill attends alone. The queries of the heads that share a K/V head are stacked, so K/V is never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpuworker.attention import AttentionMetadata, LayerAttention
from gpuworker.kv_cache import KvCache

# A batch of decodes is padded to its longest row: at most a quarter of what it gathers is padding, or this many slots a row.
_PADDING_FRACTION = 0.25
_PADDING_SLOTS = 32
# Scores that are held at once where the whole matrix is needed (softcap, sinks): 16 M floats are 64 MB.
_MAX_SCORES = 16 << 20


@dataclass(frozen=True, slots=True)
class View:
    """What a batch gathers for one window size: L slots a row."""

    blocks: torch.Tensor  # [rows * kv_heads * blocks a row], index into (block, head)
    mask: torch.Tensor | None  # [rows, 1, queries, L], True where a query sees a slot; None: causal from the first slot


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows with equally many queries that attend together; views are made when a layer first asks for its window."""

    rows: npt.NDArray[np.int64]
    queries: slice  # of the step's tokens: the batch's rows follow each other there
    query_count: int
    views: dict[int | None, View] = field(default_factory=dict)


class TorchAttention:
    """Gather and attend. Implements `gpuworker.attention.AttentionBackend`."""

    def __init__(self, cache: KvCache) -> None:
        self._block_size = cache.block_size
        self._kv_heads = cache.geometry.num_kv_heads
        self._device = cache.keys.device
        # One row of the flat pool is one slot of one head; one row of the blocked pool is one head of a block.
        self._flat = [(k.flatten(0, 2), v.flatten(0, 2)) for k, v in zip(cache.keys, cache.values, strict=True)]
        self._blocked = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(cache.keys, cache.values, strict=True)]

    def begin(self, step: AttentionMetadata) -> None:
        """Find the slots to write and the rows that attend together."""
        self._step = step
        self._writes = self._slots_by_head(step.slot_mapping)
        self._order, self._batches = _batches(step)
        self._permutation = None
        if self._order is not None:
            tokens = np.arange(step.num_tokens)
            tokens[: step.num_decodes] = self._order
            self._permutation = torch.from_numpy(tokens).to(self._device)

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        keys, values = self._flat[layer.layer]
        keys.index_copy_(0, self._writes, key.reshape(-1, key.shape[-1]).to(keys.dtype))
        values.index_copy_(0, self._writes, value.reshape(-1, value.shape[-1]).to(values.dtype))
        if self._permutation is not None:
            query = query.index_select(0, self._permutation)
        out = query.new_empty((*query.shape[:2], value.shape[-1]))
        for batch in self._batches:
            out[batch.queries] = self._attend(layer, query[batch.queries], batch)
        if self._permutation is None:
            return out
        return torch.empty_like(out).index_copy_(0, self._permutation, out)

    def _attend(self, layer: LayerAttention, query: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        """Return [tokens of the batch, num_heads, head_dim_v] for the same tokens of `query`."""
        view = self._view(batch, layer.window)
        rows, count = len(batch.rows), batch.query_count
        keys, values = (
            pool.index_select(0, view.blocks).view(rows, self._kv_heads, -1, pool.shape[-1]).float()
            for pool in self._blocked[layer.layer]
        )
        # [rows, queries, kv_heads, group, d] -> [rows, kv_heads, group, queries, d]
        stacked = query.view(rows, count, self._kv_heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4).float()
        if layer.softcap is None and layer.sinks is None:
            out = _fused(stacked, keys, values, view.mask, layer.scale)
        else:
            out = _explicit(stacked, keys, values, view.mask, layer)
        return out.permute(0, 3, 1, 2, 4).reshape(rows * count, query.shape[1], -1).to(query.dtype)

    def _slots_by_head(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return [T * kv_heads]: where in the flat pool the heads of each token go."""
        block, offset = np.divmod(slots.astype(np.int64), self._block_size)
        heads = block[:, None] * self._kv_heads + np.arange(self._kv_heads)
        return torch.from_numpy((heads * self._block_size + offset[:, None]).ravel()).to(self._device)

    def _view(self, batch: RowBatch, window: int | None) -> View:
        """Return what the batch gathers under a window: the blocks that any of its queries sees, and the mask."""
        if window not in batch.views:
            batch.views[window] = self._make_view(batch, window)
        return batch.views[window]

    def _make_view(self, batch: RowBatch, window: int | None) -> View:
        context = self._step.context_len[batch.rows].astype(np.int64)
        start = context - batch.query_count
        first_seen = np.zeros_like(start) if window is None else np.maximum(start - window + 1, 0)
        first_block = first_seen // self._block_size
        count = int((-(-context // self._block_size) - first_block).max())
        table = self._step.block_table[batch.rows]
        columns = np.minimum(first_block[:, None] + np.arange(count), table.shape[1] - 1)
        blocks = np.take_along_axis(table, columns, axis=1).astype(np.int64)  # [rows, count]
        gathered = blocks[:, None] * self._kv_heads + np.arange(self._kv_heads)[:, None]  # [rows, kv_heads, count]
        slots = first_block[:, None] * self._block_size + np.arange(count * self._block_size)  # positions, [rows, L]
        positions = start[:, None] + np.arange(batch.query_count)  # [rows, queries]
        index = torch.from_numpy(gathered.ravel()).to(self._device)
        if (
            len(batch.rows) == 1
            and start[0] == 0
            and batch.query_count > 1
            and first_seen[0] == 0
            and (window is None or batch.query_count <= window)
        ):
            return View(index, None)
        return View(index, self._mask(slots, positions, window))

    def _mask(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], window: int | None) -> torch.Tensor:
        """Return [rows, 1, queries, L]: a query sees its own position and what stands before it, inside its window."""
        at = torch.from_numpy(slots).to(self._device)[:, None, None]
        query = torch.from_numpy(positions).to(self._device)[:, None, :, None]
        seen = at <= query
        return seen if window is None else seen & (at > query - window)


def _batches(step: AttentionMetadata) -> tuple[npt.NDArray[np.int64] | None, list[RowBatch]]:
    """Return the order in which decodes attend (None: as they stand) and the batches, decodes first."""
    decodes = step.num_decodes
    order = np.argsort(step.context_len[:decodes], kind="stable")
    batches, end = [], decodes
    while end > 0:
        longest = int(step.context_len[order[end - 1]])
        shortest = min(longest * (1 - _PADDING_FRACTION), longest - _PADDING_SLOTS)
        begin = int(np.searchsorted(step.context_len[order[:end]], shortest))
        order[begin:end].sort()
        batches.append(RowBatch(order[begin:end], slice(begin, end), 1))
        end = begin
    for row in range(decodes, step.num_rows):
        begin, end = int(step.query_start[row]), int(step.query_start[row + 1])
        batches.append(RowBatch(np.array([row]), slice(begin, end), end - begin))
    return (None if (order[:-1] < order[1:]).all() else order), batches


def attend_packed(layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend over one whole sequence that is in no cache. Shapes as in `AttentionBackend.write_and_attend`."""
    count, kv_heads = len(key), key.shape[1]
    position = torch.arange(count, device=key.device)
    mask = position <= position[:, None]
    if layer.window is not None:
        mask &= position > position[:, None] - layer.window
    keys, values = (t.transpose(0, 1)[None].float() for t in (key, value))
    stacked = query.reshape(1, count, kv_heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4).float()
    out = _explicit(stacked, keys, values, mask[None, None], layer)
    return out.permute(0, 3, 1, 2, 4).reshape(count, query.shape[1], -1).to(query.dtype)


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attend with torch's own kernel. query [rows, kv_heads, group, queries, d] -> the same with d of the values."""
    rows, kv_heads, group, count, _ = query.shape
    if count == 1:
        out = scaled_dot_product_attention(query[..., 0, :], keys, values, mask, scale=scale)
        return out[..., None, :]
    heads = query.reshape(rows, kv_heads * group, count, -1)
    if mask is None:
        keys, values = keys[:, :, :count], values[:, :, :count]
    keys, values = (t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (keys, values))
    out = scaled_dot_product_attention(heads, keys, values, mask, is_causal=mask is None, scale=scale)
    return out.view(rows, kv_heads, group, count, -1)


def _explicit(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, layer: LayerAttention
) -> torch.Tensor:
    """Attend with the scores at hand, for what the fused kernel does not know: softcap and sinks. Shapes as in `_fused`."""
    rows, kv_heads, group, count, _ = query.shape
    if mask is None:
        keys, values = keys[:, :, :count], values[:, :, :count]
        mask = torch.ones((1, 1, count, count), dtype=torch.bool, device=query.device).tril()
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
        weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
        parts.append(torch.matmul(weights, values[:, :, None]))
    return torch.cat(parts, dim=-2)
