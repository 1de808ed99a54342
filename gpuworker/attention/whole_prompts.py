"""Prompts that a step computes whole, attended on K and V of every head where the cache keeps latents.

All K and V of such a prompt are in the step itself, so nothing of the cache is read. K and V of every head take a third
of the products that latents take. They lie in a scratch cache of one layer, and the cache still gets the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch

from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, DeviceTables, LayerAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.kv_cache import KvCache

WHOLE_PROMPTS_BLOCK: Final = 64
"""Slots of a block of the scratch cache."""


@runtime_checkable
class AttendsWholePrompts(Protocol):
    """An attention backend of latents that takes K and V of every head for prompts that a step computes whole."""

    def first_whole(self, layer: LayerAttention, dtype: torch.dtype) -> int:
        """Return the first token of the rows at the end of the step that are whole prompts; the step's end without any.

        `write_and_attend` then takes queries of the tokens before it alone, and K and V of all tokens. There are none
        where the cache would round K and V of this type: the tokens after the prompt read what is in the cache.
        """
        ...

    def attend_whole(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend for these rows. Shapes as in `write_and_attend`, of as many K/V heads as there are query heads."""
        ...


class WholePrompts:
    """Implements `AttentionBackend` and `AttendsWholePrompts` with a backend on a cache, and one on a scratch cache."""

    def __init__(
        self, backend: AttentionBackend, cache: KvCache, make_backend: Callable[[KvCache], AttentionBackend]
    ) -> None:
        self._backend, self._writer, self._make = backend, TorchAttention(cache), make_backend
        self._cache, self._device = cache, cache.keys.device
        self._scratch: KvCache | None = None
        self._on_scratch: AttentionBackend | None = None

    def begin(self, step: AttentionMetadata) -> None:
        """Keep the step: its first layer shows who attends for whole prompts."""
        self._step, self._others = step, _others(step)
        self._cut = int(step.query_start[self._others])
        self._begun = self._apart = self._placed = False

    def first_whole(self, layer: LayerAttention, dtype: torch.dtype) -> int:
        tokens = self._step.num_tokens
        if self._cache.key_scales is not None or dtype != self._cache.keys.dtype or self._cut == tokens:
            return tokens
        if not self._begun:
            self._writer.place(self._step.slot_mapping[self._cut :])
            if self._others:
                self._backend.begin(_first_rows(self._step, self._others))
            self._begun = self._apart = True
        return self._cut

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if not self._begun:
            self._backend.begin(self._step)
            self._begun = True
        if not self._apart:
            return self._backend.write_and_attend(layer, query, key, value)
        self._writer.write(layer, key[self._cut :], value[self._cut :])
        if not self._others:
            return query.new_empty((0, query.shape[1], value.shape[2]))
        return self._backend.write_and_attend(layer, query, key[: self._cut], value[: self._cut])

    def attend_whole(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        here = LayerAttention(0, layer.scale, layer.window, layer.softcap, layer.sinks)
        return self._ready(key, value).write_and_attend(here, query, key, value)

    def _ready(self, key: torch.Tensor, value: torch.Tensor) -> AttentionBackend:
        """Return a backend on a scratch cache with room for the rows, begun for them."""
        lengths = np.diff(self._step.query_start[self._others :]).astype(np.int32)
        blocks = -(-lengths // WHOLE_PROMPTS_BLOCK)
        sizes = (key.shape[1], key.shape[2], value.shape[2])
        if self._on_scratch is None or not self._fits(sizes, int(blocks.sum())):
            geometry = KvGeometry(1, *sizes, self._cache.geometry.dtype)
            room = 1 << int(blocks.sum() - 1).bit_length()  # larger steps do not each make another one
            self._scratch = KvCache(geometry, room, WHOLE_PROMPTS_BLOCK, self._device)
            self._on_scratch, self._placed = self._make(self._scratch), False
        if not self._placed:
            first = (np.cumsum(blocks) - blocks).astype(np.int32)
            table = first[:, None] + np.minimum(np.arange(blocks.max(), dtype=np.int32), blocks[:, None] - 1)
            rows = pack_rows(np.zeros_like(lengths), lengths, table, WHOLE_PROMPTS_BLOCK)
            self._on_scratch.begin(attention_metadata(rows, to_device(attention_arrays(rows), self._device)))
            self._placed = True
        return self._on_scratch

    def _fits(self, sizes: tuple[int, int, int], blocks: int) -> bool:
        assert self._scratch is not None
        has = self._scratch.geometry
        return (has.num_kv_heads, has.head_dim_k, has.head_dim_v) == sizes and blocks <= self._scratch.num_blocks


def _others(step: AttentionMetadata) -> int:
    """Return how many rows stand before those at the end that begin at position 0; rows of one token are decodes."""
    count = step.num_rows
    lengths = np.diff(step.query_start)
    while count > step.num_decodes and lengths[count - 1] == step.context_len[count - 1]:
        count -= 1
    return count


def _first_rows(step: AttentionMetadata, count: int) -> AttentionMetadata:
    """Return the step of the first rows alone."""
    tokens, tables = int(step.query_start[count]), step.device
    return AttentionMetadata(
        step.num_decodes,
        step.query_start[: count + 1],
        step.context_len[:count],
        step.block_table[:count],
        step.slot_mapping[:tokens],
        DeviceTables(
            tables.query_start[: count + 1],
            tables.context_len[:count],
            tables.block_table[:count],
            tables.slot_mapping[:tokens],
        ),
    )
