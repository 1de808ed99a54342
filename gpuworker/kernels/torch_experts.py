"""The experts of a layer in plain torch: for any device, and as the reference of `triton_experts`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from gpuworker.kernels.torch_elementwise import silu_and_mul


def mix_experts(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the outputs of each token's experts, added up by weight, [T, hidden] for x [T, hidden].

    Every expert computes every token, so that no shape depends on the choice; the weights of the others are 0.
    """
    chosen, weights = choose(linear(x, experts.router), experts)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        taken = chosen == number
        made = linear(silu_and_mul(linear(x, gate_up)), down).float()
        shared = weights.where(taken, 0.0).sum(dim=-1, keepdim=True)
        total += (made * shared).where(taken.any(dim=-1, keepdim=True), 0.0)
    return total.to(x.dtype)


def choose(logits: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts [T, top_k], and their weights in float32, for the router's logits [T, count]."""
    shares = torch.softmax(logits.float(), dim=-1)
    weights, chosen = shares.topk(experts.top_k, dim=-1)
    return chosen, weights / weights.sum(dim=-1, keepdim=True) if experts.normalised else weights


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
