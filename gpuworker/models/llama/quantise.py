"""Integers for a float weight: 8 bits for each output, or 4 bits for each group of inputs, to nearest.

For 4 bits the largest number need not be kept: a range clipped to what gives the least squared error is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from gpuworker.native.linear import IntegerWeight

# Rows are quantised this many numbers at a time: what is in between stays small beside the weight.
_AT_ONCE: Final = 4 << 20
_CLIPS: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def int8_by_output(weight: torch.Tensor) -> IntegerWeight:
    """Return a weight [N, K] as int8 in [-127, 127], one scale for each output: the largest number there is 127."""
    parts = [_symmetric(rows[:, None], 127)[:2] for rows in _slices(weight)]
    return _joined([(values, scales, None) for values, scales in parts], weight)


def int8_by_group(weight: torch.Tensor, group: int) -> IntegerWeight:
    """Return a weight [N, K] as int8 in [-127, 127], one scale for each `group` inputs of an output."""
    parts = [_symmetric(_grouped(rows, group), 127)[:2] for rows in _slices(weight)]
    return _joined([(values, scales, None) for values, scales in parts], weight)


def int4_by_group(weight: torch.Tensor, group: int, *, zeros: bool = False) -> IntegerWeight:
    """Return a weight [N, K] as integers in [-8, 7], one scale (and zero) for each `group` inputs of an output.

    Of several ranges, from that of the group's numbers to 0.7 of it, each group takes the one of least squared error.
    """
    return _joined([_least_squares(_grouped(rows, group), zeros) for rows in _slices(weight)], weight)


def rounding_error(weight: torch.Tensor, rounded: IntegerWeight) -> float:
    """Return the root mean square of what rounding changed, over the mean magnitude of a weight [N, K].

    The mean is less than the root mean square where a few large numbers make the steps of all others coarse. Integers
    with zeros are not expected; a weight of zeros has no error.
    """
    lost, whole, begin = 0.0, 0.0, 0
    for rows in _slices(weight):
        values, scales = (part[begin : begin + len(rows)] for part in (rounded.values, rounded.scales))
        found = _grouped(values.float(), weight.shape[1] // scales.shape[1]) * scales[..., None]
        lost += float((found.view(rows.shape) - rows).square().sum())
        whole, begin = whole + float(rows.abs().sum()), begin + len(rows)
    count = weight.numel()
    return (lost / count) ** 0.5 / (whole / count) if whole else 0.0


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # values [R, G, group], scales and zeros [R, G]


def _least_squares(groups: torch.Tensor, zeros: bool) -> _Part:
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    least = torch.full(groups.shape[:2], torch.inf)
    for clip in _CLIPS:
        values, scales, zero = _asymmetric(groups, clip) if zeros else _symmetric(groups, 7, clip)
        error = ((values - zero[..., None]) * scales[..., None] - groups).square().sum(-1)
        if best is None:
            best, least = (values, scales, zero), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best[0][better], best[1][better], best[2][better] = values[better], scales[better], zero[better]
    assert best is not None
    return best[0], best[1], best[2] if zeros else None


def _symmetric(groups: torch.Tensor, most: int, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values [R, G, group] in [-most, most] and scales [R, G]; zeros are 0."""
    largest = groups.abs().amax(-1) * clip
    scales = torch.where(largest > 0, largest / most, 1.0)
    values = (groups / scales[..., None]).round().clamp(-most, most)
    return values, scales, torch.zeros_like(scales)


def _asymmetric(groups: torch.Tensor, clip: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values in [-8, 7], scales, and whole zeros in [-8, 7], so that 0 is exact."""
    low, high = groups.amin(-1).clamp(max=0) * clip, groups.amax(-1).clamp(min=0) * clip
    scales = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-8 - low / scales).round().clamp(-8, 7)
    values = (groups / scales[..., None] + zero[..., None]).round().clamp(-8, 7)
    return values, scales, zero


def _grouped(rows: torch.Tensor, group: int) -> torch.Tensor:
    if rows.shape[1] % group:
        raise ValueError(f"{rows.shape[1]} inputs cannot be cut into groups of {group}")
    return rows.view(len(rows), -1, group)


def _slices(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    at_once = max(1, _AT_ONCE // max(1, weight.shape[1]))
    return (weight[begin : begin + at_once].float() for begin in range(0, len(weight), at_once))


def _joined(parts: list[_Part], weight: torch.Tensor) -> IntegerWeight:
    values = torch.cat([part[0].to(torch.int8) for part in parts]).view(weight.shape)
    zeros = [part[2] for part in parts if part[2] is not None]
    return IntegerWeight(values, torch.cat([part[1] for part in parts]), torch.cat(zeros) if zeros else None)
