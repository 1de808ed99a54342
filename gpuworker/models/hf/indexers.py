"""Indexers: modules that choose, for each token, the positions that its layer attends on.

An indexer of transformers takes sequences [B, T, hidden], a mask, and a cache of index keys; it returns the positions
[B, T, n] with the best scores. A step has all its rows in one packed row, [1, T, hidden]. So an indexer is called for
parts of a step (`gpuworker.attention.index_keys`), each with the mask of its positions and the keys of its rows; its
cache is a `_Call`. Attention gets the positions of all tokens as `indices`; layers that share them hand them on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from common.contracts.errors import Unsupported
from gpuworker.attention.by_shape import index_keys_of
from gpuworker.attention.index_keys import IndexPart, IndexStore, PackedIndexKeys
from gpuworker.attention.interface import LayerSink
from gpuworker.memory.devices import dtype_name
from gpuworker.memory.layout import IndexKey
from gpuworker.models.hf.mixer_calls import cut

_ATTRIBUTE: Final = "quire_indexer"
_MASK, _CACHE = "attention_mask", "past_key_values"
# Under these names configurations have how many tokens are chosen together.
_BLOCKS: Final = ("indexer_compress_ratio", "index_kpool")


class Causal:
    """Stands for the mask of a packed row: a layer hands parts of it to its indexer, and the whole to attention."""

    def __getitem__(self, _: Any) -> Causal:
        return self


CAUSAL: Final = Causal()


def replace_indexers(model: nn.Module, sink: Callable[[], LayerSink | None]) -> None:
    """Let the indexers of a model choose for packed rows; `sink` returns that of the step that runs, if one does."""
    for layer in model.modules():
        for child in layer.children():
            if _keeps_index_keys(child):
                setattr(layer, _ATTRIBUTE, _Indexer(child, sink))
                layer.register_forward_pre_hook(_with_mask, with_kwargs=True)


def index_key_of(module: nn.Module) -> IndexKey | None:
    """Return the index key that the indexer of an attention layer keeps, after its first run; None without one."""
    found: _Indexer | None = getattr(module, _ATTRIBUTE, None)
    return None if found is None else found.key


def refuse_blocks_of_keys(config: Any) -> None:
    """Raise Unsupported for a configuration whose indexers choose blocks of tokens."""
    for name in _BLOCKS:
        if getattr(config, name, 1) != 1:
            raise Unsupported(
                f"{config.model_type} chooses blocks of tokens ({name}), by keys pooled of all tokens of a block; only"
                " indexers that choose single tokens can be followed"
            )


def _keeps_index_keys(module: nn.Module) -> bool:
    try:
        return ".update_indexer(" in inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False


def _with_mask(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a layer of a packed row a mask, for its indexer; the model's own attention has one."""
    return given, {**named, _MASK: CAUSAL} if named.get(_MASK) is None else named


class _Indexer:
    """One module, whose forward is replaced. `key` is known once it has run on a packed row."""

    def __init__(self, module: Any, sink: Callable[[], LayerSink | None]) -> None:
        self.key: IndexKey | None = None
        self._layer, self._heads, self._size = int(module.layer_idx), int(module.n_heads), int(module.head_dim)
        self._forward, self._sink = module.forward, sink
        self._signature = inspect.signature(module.forward)
        module.forward = self._run

    @torch.no_grad()
    def _run(self, *given: Any, **named: Any) -> torch.Tensor:
        arguments = dict(self._signature.bind(*given, **named).arguments)
        if arguments.get(_MASK) is not CAUSAL:
            chosen: torch.Tensor = self._forward(*given, **named)
            return chosen
        hidden: torch.Tensor = next(iter(arguments.values()))
        count = hidden.shape[1]
        store = index_keys_of(self._sink()) or PackedIndexKeys(count, hidden.device)
        parts = store.parts(self._heads, self._size)
        found = [self._choose(arguments, part, store, count).flatten(0, 1) for part in parts]
        return _all_of(found, parts, count)[None]

    def _choose(self, arguments: dict[str, Any], part: IndexPart, store: IndexStore, count: int) -> torch.Tensor:
        """Return the positions [B, L, n] of the tokens of a part."""
        call = _Call(store, self._layer, part)
        seen = torch.arange(part.context, device=part.positions.device) <= part.positions[..., None]
        own = {name: cut(value, part.tokens, part.shape, count) for name, value in arguments.items()}
        chosen: torch.Tensor = self._forward(**{**own, _MASK: seen, _CACHE: call})
        self.key = call.key
        return chosen


def _all_of(found: Sequence[torch.Tensor], parts: Sequence[IndexPart], count: int) -> torch.Tensor:
    """Return [T, n] of the parts' [B * L, up to n]; what a part chose less is no position."""
    widest = max(each.shape[1] for each in found)
    chosen = found[0].new_full((count, widest), -1)
    for each, part in zip(found, parts, strict=True):
        chosen[part.tokens, : each.shape[1]] = each
    return chosen


class _Call:
    """The cache that an indexer sees in one call, by the interface of transformers' `Cache`."""

    def __init__(self, store: IndexStore, layer: int, part: IndexPart) -> None:
        self._store, self._layer, self._part = store, layer, part
        self.key: IndexKey | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Keep the index keys [B, L, d] of the part's tokens; return those of their context [B, context, d]."""
        self.key = IndexKey(indexer_key_states.shape[-1], dtype_name(indexer_key_states.dtype))
        return self._store.exchange(self._layer, self._part, indexer_key_states)
