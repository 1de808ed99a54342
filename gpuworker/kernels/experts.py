"""The experts of a layer, as one argument of the kernels that run them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a layer, of which each token goes through `top_k`, and the router that chooses them.

    router [count, hidden]; gate_up [count, 2 * inner, hidden], the gates before the ups; down [count, hidden, inner].
    All are contiguous and of one type. The weights of a token's experts are a softmax of their logits: over those
    experts where they are `normalised`, else over all.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int
    normalised: bool

    @property
    def count(self) -> int:
        return len(self.router)
