"""Rotary position embedding (rope) of a layer of the Llama family, as one argument of a fused kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpuworker.kernels.torch_elementwise import apply_rope, rms_norm


@dataclass(frozen=True, slots=True)
class Rope:
    """The rope angles of a step's tokens, and the norms of one layer that precede them.

    table [max_positions, head_dim] float32 holds, for each position, head_dim / 2 cosines and then as many sines;
    positions [T]. Norm weights [head_dim] are None where the model norms no heads.
    """

    table: torch.Tensor
    positions: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    eps: float = 0.0

    def apply_rope(self, heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Return queries or keys [T, n, head_dim], normed head by head if there is a norm, then after rope."""
        if norm is not None:
            heads = rms_norm(heads, norm, self.eps)
        return apply_rope(heads, self.table, self.positions)
