"""Attention modules that count positions themselves: in a step's packed row, a token's place is not its position.

llama4 scales the queries of layers without rope by a token's position: its place in the row, behind as many tokens as
the cache has (`get_seq_length`). In a step such a module gets a cache that has, for each token, as many as its position
is ahead of its place. The formula stays the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def correct_positions(model: nn.Module, positions: Callable[[], torch.Tensor | None]) -> None:
    """Let modules that count positions count those of the step that runs, [T]; None: no step, rows are sequences."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.forward = partial(_run, module.forward, positions)


def _run(forward: Callable[..., Any], positions: Callable[[], torch.Tensor | None], *given: Any, **named: Any) -> Any:
    at = positions()
    if at is not None:
        named["past_key_values"] = _Ahead(at - torch.arange(len(at), device=at.device))
    return forward(*given, **named)


class _Ahead:
    """The cache that a module sees, by the interface of transformers' `Cache`: it keeps nothing."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens  # [T], by how much each position is ahead of its place

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self._tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states
