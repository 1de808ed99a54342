"""The experts of a layer in plain torch: for any device, and as the reference of `triton_experts`."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from gpuworker.kernels.experts import Experts
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
