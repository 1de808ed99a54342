"""Attention over layers of several shapes: a backend for each pool, all on the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, LayerAttention
from gpuworker.attention.whole_prompts import AttendsWholePrompts


class AttentionByShape:
    """Implements `gpuworker.attention.interface.AttentionBackend`.

    `layers` has, for each backend, the numbers in the model of the layers of its pool.
    """

    def __init__(self, backends: Sequence[AttentionBackend], layers: Sequence[Sequence[int]]) -> None:
        self._backends = backends
        self._places = {
            number: (backend, index)
            for backend, numbers in zip(backends, layers, strict=True)
            for index, number in enumerate(numbers)
        }

    def begin(self, step: AttentionMetadata) -> None:
        for backend in self._backends:
            backend.begin(step)

    def first_whole(self, layer: LayerAttention, dtype: torch.dtype) -> int:
        """Return that of the layer's backend (`AttendsWholePrompts`), which is one of latents."""
        backend, there = self._place(layer)
        assert isinstance(backend, AttendsWholePrompts)
        return backend.first_whole(there, dtype)

    def attend_whole(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        backend, there = self._place(layer)
        assert isinstance(backend, AttendsWholePrompts)
        return backend.attend_whole(there, query, key, value)

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        backend, there = self._place(layer)
        return backend.write_and_attend(there, query, key, value)

    def _place(self, layer: LayerAttention) -> tuple[AttentionBackend, LayerAttention]:
        backend, index = self._places[layer.kept_at]
        return backend, replace(layer, layer=index, source=None if layer.source is None else index)
