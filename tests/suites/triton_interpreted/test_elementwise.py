"""Fused norm and gate against the same steps in float64."""

from __future__ import annotations

import pytest
import torch

from gpuworker.kernels.triton_elementwise import add_rms_norm, rms_norm, silu_and_mul

DRAW = torch.Generator().manual_seed(0)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same numbers, whichever ran before it in its process."""
    DRAW.manual_seed(0)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [48, 128])
def test_rms_norm(dtype: torch.dtype, hidden: int) -> None:
    x, weight = torch.randn((3, hidden), generator=DRAW).to(dtype), torch.randn(hidden, generator=DRAW).to(dtype)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), normed(x, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_residual_is_added_in_place_and_normed(dtype: torch.dtype) -> None:
    x, residual = (torch.randn((3, 48), generator=DRAW).to(dtype) for _ in range(2))
    weight, total = torch.randn(48, generator=DRAW).to(dtype), x + residual
    found = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(found.double(), normed(total, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_and_mul_crosses_its_tile(dtype: torch.dtype) -> None:
    gate_up = torch.randn((2, 2 * 1100), generator=DRAW).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    torch.testing.assert_close(silu_and_mul(gate_up).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_of_a_wider_tensor_are_read_by_their_stride() -> None:
    wide = torch.randn((3, 100), generator=DRAW)
    weight = torch.ones(48)
    torch.testing.assert_close(rms_norm(wide[:, :48], weight, 1e-5), rms_norm(wide[:, :48].contiguous(), weight, 1e-5))
    torch.testing.assert_close(silu_and_mul(wide[:, 20:60]), silu_and_mul(wide[:, 20:60].contiguous()))


def test_a_step_without_tokens_launches_nothing() -> None:
    assert rms_norm(torch.empty((0, 8)), torch.ones(8), 1e-5).shape == (0, 8)
    assert silu_and_mul(torch.empty((0, 8))).shape == (0, 4)
