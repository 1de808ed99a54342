"""Fused elementwise steps of a Llama-like layer in Triton: RMS norm with the residual added, and the gated SiLU.

Each reads its input once and writes its result once; arithmetic is float32, results have the type of the input.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SILU_TILE = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last axis. x [T, hidden], rows contiguous; weight [hidden]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, None, weight, eps, out)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` in place and return the RMS norm of the sum. x and residual [T, hidden], weight [hidden].

    The sum is rounded to the type of `residual` before it is normed, as where the two are steps of their own.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, residual, weight, eps, out)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, width], for gate_up [T, 2 * width]: the gates, then the ups. Rows contiguous."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    if tokens:
        grid = (tokens, triton.cdiv(width, _SILU_TILE))
        silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, TILE=_SILU_TILE, num_warps=4)
    return out


def norm_warps(hidden: int) -> int:
    """Return how many warps norm one row: 16 values a thread keep the row in registers and the loads wide."""
    return min(max(int(triton.next_power_of_2(hidden)) // 512, 1), 16)


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    tokens, hidden = x.shape
    if not tokens:
        return
    added = residual is not None
    rms_norm_kernel[(tokens,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        hidden,
        eps,
        ADDED=added,
        TILE=triton.next_power_of_2(hidden),
        num_warps=norm_warps(hidden),
    )


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, hidden, eps, ADDED: tl.constexpr, TILE: tl.constexpr
):
    """One program norms one row; with ADDED, of x + residual, which it also writes back."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < hidden
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        into = residual + row * residual_stride + at
        total = (value + tl.load(into, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(into, total, mask=inside)
        value = total.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / hidden + eps)
    scaled = value * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up, out, stride, width, TILE: tl.constexpr):
    """One program makes TILE values of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
