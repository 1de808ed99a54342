"""Weights of experts in MXFP4, as gpt-oss is published.

The parameter P of E experts, [E, K, N], is stored transposed as P_blocks, uint8 [E, N, K / 32, 16], two 4-bit numbers
in a byte, the lower first, and P_scales, uint8 [E, N, K / 32]: number = fp4 · 2^(scale - 127), where fp4 has one bit of
sign, two of exponent, one of mantissa. Format: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from gpuworker.checkpoints.quantised import Found, unpack
from gpuworker.checkpoints.stored_tensors import StoredTensors

_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS: Final = (*_POSITIVE, *(-number for number in _POSITIVE))
_BIAS: Final = 127


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """One parameter of all experts."""

    name: str
    blocks: torch.Tensor  # uint8 [E, N, K / 32, 16]
    scales: torch.Tensor  # uint8 [E, N, K / 32]

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the parameter [E, K, N] in `dtype`; bfloat16 holds these numbers exactly."""
        experts, outputs, blocks = self.scales.shape
        numbers = torch.tensor(_NUMBERS)
        out = torch.empty((experts, blocks * 32, outputs), dtype=dtype)
        for expert, (stored, scales) in enumerate(zip(self.blocks, self.scales, strict=True)):
            index = unpack(stored.flatten(0, 1), 4).long()  # [N · K/32, 32]
            exact = torch.ldexp(numbers[index], scales.flatten().int()[:, None] - _BIAS)
            out[expert] = exact.view(outputs, -1).t()
        return out


def find(stored: StoredTensors, config: Mapping[str, Any]) -> Found:
    """Return the packed weights of a checkpoint; the format has no variants."""
    found = Found()
    for name in stored:
        plain = name.removesuffix("_blocks")
        if plain != name and f"{plain}_scales" in stored:
            found.weights[plain] = partial(_read, stored, plain)
            found.parts |= {name, f"{plain}_scales"}
    return found


def _read(stored: StoredTensors, plain: str) -> Mxfp4Experts:
    return Mxfp4Experts(plain, stored[f"{plain}_blocks"].map(), stored[f"{plain}_scales"].map())
