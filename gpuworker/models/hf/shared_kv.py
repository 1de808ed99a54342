"""Layers that attend on the K and V of an earlier layer (gemma3n, gemma4): the cache keeps these once.

A module says that it shares (`is_kv_shared_layer`). Whose K and V it takes shows in one run: it hands on the same
tensors as the layer that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import torch
from torch import nn

from common.contracts.errors import Unsupported
from gpuworker.attention.interface import LayerAttention, LayerSink
from gpuworker.attention.torch_backend import attend_packed

_ATTRIBUTE = "quire_source"


def source_of(module: nn.Module) -> int | None:
    """Return the layer whose K and V a module attends on; None where it has its own."""
    found: int | None = getattr(module, _ATTRIBUTE, None)
    return found


def find_sources(model: nn.Module, run: Callable[[LayerSink], object]) -> None:
    """Note on each module that shares K and V whose they are; `run` runs the model on a token or more."""
    sharing = [each for each in model.modules() if getattr(each, "is_kv_shared_layer", False) is True]
    if not sharing:
        return
    seen = _Seen()
    try:
        run(seen)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, Unsupported):
        return  # the self-test reports the error
    for each in sharing:
        index = getattr(each, "layer_idx", None)
        setattr(each, _ATTRIBUTE, seen.first_with(index) if index in seen.keys else None)


class _Seen:
    """Attends without a cache, and keeps the K and V that each layer hands over."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.keys[layer.layer] = key, value
        return attend_packed(layer, query, key, value)

    def first_with(self, layer: int) -> int | None:
        """Return the first layer before this one that handed over the same tensors."""
        before = takewhile(lambda other: other != layer, self.keys)
        return next((other for other in before if _are_same(self.keys[other], self.keys[layer])), None)


def _are_same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether both name the same memory. All of it is held, so that none is used again."""
    return all(
        (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
        for a, b in zip(one, other, strict=True)
    )
