"""The interface of attention and cache write that every backend implements (torch, Triton, C++).

A backend is bound to a KV cache. The caller announces each step once with `begin`, where the backend plans the work
that all layers share. Then it calls the backend once per layer. A call writes K and V of all tokens of the step into
their slots before it attends. So a row may read what another row of the same step has just written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.memory.layout import IndexKey

Int32Array = npt.NDArray[np.int32]
_Positions = TypeVar("_Positions", npt.NDArray[np.int64], torch.Tensor)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The parameters of attention in one layer.

    `scale` multiplies the scores; `softcap` bounds them to ±softcap by tanh; `window` counts the positions that a query
    sees, itself included; `sinks` [num_heads] are logits of a key without value that enters the softmax's denominator.
    With `values_in_keys` V is a prefix of K, and a cache of this layer keeps K alone (`KvGeometry.values_in_keys`).
    `source` is the layer that attended before and whose K and V these are: nothing is written; None: the layer's own.
    With `chunk`, which excludes a window, a query at position p sees those from p // chunk * chunk on.
    Of a layer that attends by index, `indices` [T, n] are the positions that each query keeps of those that it sees; -1
    stands for none. `index` is the key that its own indexer keeps of each token.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    values_in_keys: bool = False
    source: int | None = None
    chunk: int | None = None
    indices: torch.Tensor | None = None
    index: IndexKey | None = None

    @property
    def kept_at(self) -> int:
        """The layer of the cache in which K and V are."""
        return self.layer if self.source is None else self.source

    def first_seen(self, position: _Positions) -> _Positions:
        """Return the first position that queries at these see, of any shape; a window's may be negative."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return position * 0 if self.window is None else position - self.window + 1


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What a step computes, for attention: R rows, T tokens; row r has queries query_start[r] : query_start[r+1].

    The arrays are on the host; the tensors of the same names in `device` hold the same numbers on the device.
    Rows with one query come first: `num_decodes` of them. Where layers are groups, `parts` has the step as the layers
    of each part see it (`gpuworker.memory.layout.Part`): they differ in tables and slots, and the first is like this.
    """

    num_decodes: int
    query_start: Int32Array  # [R + 1], where each row's queries begin; the last entry is T
    context_len: Int32Array  # [R], positions of K/V that exist once this step's are written
    block_table: Int32Array  # [R, max_blocks]; trimmed entries and those past a row's end name any block, unseen
    slot_mapping: Int32Array  # [T], block * block_size + offset
    device: DeviceTables
    parts: tuple[AttentionMetadata, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.context_len)

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """The arrays of `AttentionMetadata` on the device, int32, of the same shapes."""

    query_start: torch.Tensor
    context_len: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class LayerSink(Protocol):
    """Receives the calls of a model's attention layers: a backend, or the recorder of the self-test."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write key and value into their slots, then attend from every query over its row's context, causally.

        Of a layer with a `source` nothing is written.

        query [T, num_heads, head_dim_k], key [T, num_kv_heads, head_dim_k], value [T, num_kv_heads, head_dim_v], all of
        any strides; returns [T, num_heads, head_dim_v] in the type of `query`.
        """
        ...


class AttentionBackend(LayerSink, Protocol):
    """Attention over one KV cache. One thread uses it; steps and layers come in order."""

    def begin(self, step: AttentionMetadata) -> None:
        """Plan the work that all layers of the step share. The caller does this before the first layer."""
        ...
