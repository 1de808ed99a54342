"""The fused Triton kernels of a Llama-like layer in plain torch: for any device, and as their reference.

The names, shapes and rounding are those of `triton_elementwise` and `triton_rope`: arithmetic in float32, one rounding
a result.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last axis, for any leading axes."""
    exact = x.float()
    scaled = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` in place and return the RMS norm of the sum. Both [T, hidden], weight [hidden]."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, width], for gate_up [T, 2 * width]: the gates, then the ups."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def apply_rope(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return heads [T, n, d] after rope at their positions [T]; x_i is rotated with x_{i + d/2}.

    table [max_len, d] float32 holds, for each position, d/2 cosines and then d/2 sines.
    """
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return both.to(heads.dtype)
