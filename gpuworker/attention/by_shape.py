"""Attention over layers of several shapes, a backend for each pool; over groups of layers; over layers with indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from gpuworker.attention.index_keys import IndexStore, PagedIndexKeys
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, LayerAttention, LayerSink
from gpuworker.attention.whole_prompts import AttendsWholePrompts


class AttentionByShape:
    """All backends are on the same blocks. Implements `gpuworker.attention.interface.AttentionBackend`.

    `layers` has, for each backend, the layers of its pool, by their numbers in the model. `index_keys` are those of
    layers with an indexer, if there are any.
    """

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        layers: Sequence[Mapping[int, int]],
        index_keys: PagedIndexKeys | None = None,
    ) -> None:
        self.backends, self.index_keys = backends, index_keys
        self._places = {
            number: (backend, index) for backend, places in enumerate(layers) for number, index in places.items()
        }

    def begin(self, step: AttentionMetadata) -> None:
        self._tokens = step.num_tokens
        for backend in self.backends:
            backend.begin(step)
        if self.index_keys is not None:
            self.index_keys.begin(step)

    def first_whole(self, layer: LayerAttention, dtype: torch.dtype) -> int:
        """Return that of the layer's backend (`AttendsWholePrompts`); the step's end where it has none."""
        backend, there = self._place(layer)
        return backend.first_whole(there, dtype) if isinstance(backend, AttendsWholePrompts) else self._tokens

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

    def places_of(self, layer: int) -> Sequence[tuple[int, int]]:
        """Return by which backend a layer attends, and which layer it is there; nothing where it keeps no K and V.

        Of a layer whose heads lie in several lanes it is so for each lane, in the order of the heads.
        """
        return [self._places[layer]] if layer in self._places else ()

    def _place(self, layer: LayerAttention) -> tuple[AttentionBackend, LayerAttention]:
        backend, index = self._places[layer.kept_at]
        return self.backends[backend], _in_lane(layer, index)


class AttentionByPart(AttentionByShape):
    """Attention over groups of layers: each backend is on the blocks of its own part of the step (`Part`).

    `lanes` has, for each backend, the lanes of the layers in its part. A layer in several lanes has equally many heads
    in each, and attends with those of one lane after the other.
    """

    def __init__(self, backends: Sequence[AttentionBackend], lanes: Sequence[Mapping[int, Sequence[int]]]) -> None:
        super().__init__(backends, [{layer: its[0] for layer, its in part.items()} for part in lanes])
        found: dict[int, list[tuple[int, int]]] = {}
        for number, part in enumerate(lanes):
            for layer, its in part.items():
                found.setdefault(layer, []).extend((number, lane) for lane in its)
        self._by_heads = {layer: places for layer, places in found.items() if len(places) > 1}

    def begin(self, step: AttentionMetadata) -> None:
        self._tokens = step.num_tokens
        for backend, part in zip(self.backends, step.parts or (step,), strict=True):
            backend.begin(part)

    def places_of(self, layer: int) -> Sequence[tuple[int, int]]:
        return self._by_heads.get(layer) or super().places_of(layer)

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        places = self._by_heads.get(layer.kept_at)
        if places is None:
            return super().write_and_attend(layer, query, key, value)
        count = len(places)
        sinks = [None] * count if layer.sinks is None else layer.sinks.chunk(count)
        heads = zip(places, sinks, *(each.chunk(count, dim=1) for each in (query, key, value)), strict=True)
        out = [
            self.backends[number].write_and_attend(replace(_in_lane(layer, lane), sinks=its_sinks), *numbers)
            for (number, lane), its_sinks, *numbers in heads
        ]
        return torch.cat(out, dim=1)


class AttentionByIndex:
    """Attends by `sparse` where a query sees more positions than it keeps, else by `full`, which knows no indices.

    Both are on one cache. Implements `gpuworker.attention.interface.AttentionBackend`.
    """

    def __init__(self, full: AttentionBackend, sparse: AttentionBackend) -> None:
        self._full, self._sparse = full, sparse

    def begin(self, step: AttentionMetadata) -> None:
        self._step, self._longest, self._begun = step, int(step.context_len.max(initial=0)), False
        self._full.begin(step)

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if layer.indices is None or layer.indices.shape[-1] >= self._longest:
            return self._full.write_and_attend(replace(layer, indices=None), query, key, value)
        if not self._begun:
            self._sparse.begin(self._step)
            self._begun = True
        return self._sparse.write_and_attend(layer, query, key, value)


def _in_lane(layer: LayerAttention, index: int) -> LayerAttention:
    """Return the layer as a backend sees it whose cache has it at this index."""
    return replace(layer, layer=index, source=None if layer.source is None else index)


def index_keys_of(sink: LayerSink | None) -> IndexStore | None:
    """Return where a sink keeps index keys; None where it keeps nothing."""
    return sink.index_keys if isinstance(sink, AttentionByShape) else None
