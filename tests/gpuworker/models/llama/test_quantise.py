"""Quantising float weights: exact numbers on small ones, and errors no larger than the steps allow."""

from __future__ import annotations

import pytest
import torch

from gpuworker.models.llama.linears import int4_by_group, int8_by_group, int8_by_output, rounding_error
from gpuworker.native.linear import IntegerWeight


def _back(weight: IntegerWeight) -> torch.Tensor:
    groups = weight.values.float().unflatten(1, (weight.scales.shape[1], -1))
    zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
    back: torch.Tensor = ((groups - zeros[..., None]) * weight.scales[..., None]).flatten(1)
    return back


def test_the_largest_number_of_an_output_becomes_127() -> None:
    weight = int8_by_output(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    assert weight.values.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert weight.scales.flatten().tolist() == pytest.approx([1 / 127, 1.0])


def test_a_group_has_a_scale_of_its_own() -> None:
    weight = int8_by_group(torch.tensor([[1.0, -2.0, 10.0, 20.0]]), 2)
    assert weight.values.tolist() == [[64, -127, 64, 127]]
    assert weight.scales.tolist() == [pytest.approx([2 / 127, 20 / 127])]


def test_numbers_on_the_grid_of_four_bits_are_kept() -> None:
    grid = torch.arange(-7, 8).float().repeat(1, 2)[:, :28] * 0.25
    assert torch.equal(_back(int4_by_group(grid, 14)), grid)


def test_with_zeros_a_range_on_one_side_uses_all_sixteen_steps() -> None:
    weight = torch.arange(16).float()[None] * 0.5
    quantised = int4_by_group(weight, 16, zeros=True)
    assert quantised.zeros is not None
    assert quantised.values.tolist() == [list(range(-8, 8))]
    assert torch.equal(_back(quantised), weight)


@pytest.mark.parametrize("zeros", [False, True])
def test_clipping_lowers_the_squared_error(zeros: bool) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    kept = weight.unflatten(1, (-1, 128))
    if zeros:
        low, high = kept.amin(-1, keepdim=True), kept.amax(-1, keepdim=True)
        step = (high - low) / 15
        offset = (low / step).round()
        plain = ((kept / step).round().clamp(offset, offset + 15) * step).flatten(1)
    else:
        step = kept.abs().amax(-1, keepdim=True) / 7
        plain = ((kept / step).round() * step).flatten(1)
    error = (_back(int4_by_group(weight, 128, zeros=zeros)) - weight).square().sum()
    assert error < 0.97 * (plain - weight).square().sum()


def test_a_group_must_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        int4_by_group(torch.ones(2, 40), 32)


def test_the_error_of_rounding_is_over_the_mean_magnitude() -> None:
    weight = torch.tensor([[127.0, 0.5, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rounded = IntegerWeight(torch.tensor([[127, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int8), torch.ones(2, 1))
    assert rounding_error(weight, rounded) == pytest.approx((0.5 / 8) ** 0.5 / (128 / 8))
    assert rounding_error(torch.zeros(2, 4), rounded) == 0.0


def test_the_error_of_rounding_counts_groups_and_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    found = int4_by_group(weight, 32)
    expected = float((_back(found) - weight).square().mean().sqrt() / weight.abs().mean())
    monkeypatch.setattr("gpuworker.models.llama.linears._AT_ONCE", 1000)
    assert rounding_error(weight, found) == pytest.approx(expected, rel=1e-4)
