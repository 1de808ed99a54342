"""Writes quantised weights as the descriptions of their formats say, one number at a time: shares no code with readers.

A weight here is what it means: integers [N, K], a scale and a zero point for each group of inputs, and each input's
group. `plain` says which floats that is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Ints = npt.NDArray[np.int64]
Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Weight:
    """Unsigned numbers of `bits` bits [N, K], zero points [N, groups] on the same scale, scales, groups of inputs."""

    bits: int
    numbers: Ints
    zeros: Ints
    scales: torch.Tensor  # float16 [N, groups]
    group_of: Ints

    def plain(self) -> torch.Tensor:
        """Return the weight in float32."""
        scales = self.scales.float().numpy()
        out = np.zeros(self.numbers.shape, dtype=np.float32)
        for (n, k), number in np.ndenumerate(self.numbers):
            group = self.group_of[k]
            out[n, k] = np.float32(number - self.zeros[n, group]) * scales[n, group]
        return torch.from_numpy(out)


def quantise(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, shuffle: bool = False) -> Weight:
    """Return the nearest quantised weight; a shuffle deals inputs to groups at random, as act-order does."""
    exact = weight.double().numpy()
    outputs, inputs = exact.shape
    group_of = np.arange(inputs) // group_size
    if shuffle:
        group_of = np.random.default_rng(0).permutation(group_of)
    groups, top = group_of.max() + 1, 2**bits - 1
    numbers = np.zeros(exact.shape, dtype=np.int64)
    zeros = np.full((outputs, groups), 2 ** (bits - 1), dtype=np.int64)
    scales = torch.zeros((outputs, groups), dtype=torch.float16)
    for n in range(outputs):
        for group in range(groups):
            own = exact[n, group_of == group]
            low, high = min(own.min(), 0.0), max(own.max(), 0.0)
            width = 2 * max(-low, high) if symmetric else high - low
            scales[n, group] = max(width / top, 1e-4)
            if not symmetric:
                zeros[n, group] = np.clip(round(-low / float(scales[n, group])), 1, top)
            steps = np.rint(own / float(scales[n, group])) + zeros[n, group]
            numbers[n, group_of == group] = np.clip(steps, 0, top)
    return Weight(bits, numbers, zeros, scales, group_of)


def words(numbers: Ints, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return int32 [R, C · bits / 32] of rows of numbers, lowest bits first; `order`: which of a word's comes when."""
    count = 32 // bits
    rows, columns = numbers.shape
    out = np.zeros((rows, -(-columns // count)), dtype=np.uint32)
    for (row, column), _ in np.ndenumerate(out):
        for place in range(count):
            source = column * count + (order[place] if order else place)
            if source < columns:
                out[row, column] |= np.uint32(numbers[row, source] << (place * bits))
    return torch.from_numpy(out.view(np.int32))


def gptq(weight: Weight, first_version: bool = True) -> Parts:
    """Return qweight, qzeros, scales and g_idx."""
    return {
        "qweight": words(weight.numbers, weight.bits).t().contiguous(),
        "qzeros": words(weight.zeros.T - int(first_version), weight.bits),
        "scales": weight.scales.t().contiguous(),
        "g_idx": torch.from_numpy(weight.group_of).int(),
    }


def awq(weight: Weight) -> Parts:
    """Return qweight, qzeros and scales."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(weight.numbers.T, 4, order),
        "qzeros": words(weight.zeros.T, 4, order),
        "scales": weight.scales.t().contiguous(),
    }


def pack_quantized(weight: Weight, symmetric: bool = True) -> Parts:
    """Return weight_packed and what belongs to it."""
    parts = {
        "weight_packed": words(weight.numbers, weight.bits),
        "weight_scale": weight.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.numbers.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(weight.zeros.T, weight.bits).t().contiguous()
    if not (np.sort(weight.group_of) == weight.group_of).all():
        parts["weight_g_idx"] = torch.from_numpy(weight.group_of).int()
    return parts


def int_quantized(weight: Weight, symmetric: bool = True) -> Parts:
    """Return an int8 weight and its scales."""
    parts = {
        "weight": torch.from_numpy(weight.numbers - 128).to(torch.int8),
        "weight_scale": weight.scales.bfloat16(),
    }
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(weight.zeros - 128).to(torch.int8)
    return parts


def rewrite(
    source: Path,
    target: Path,
    pack: Callable[[str, torch.Tensor], tuple[Parts, torch.Tensor] | None],
    quantisation: Mapping[str, Any],
) -> Path:
    """Copy a checkpoint with weights packed, and beside it ("-plain") one with the same weights in float32.

    `pack` is given the name of a layer and its weight and returns the parts and what they mean, or None.
    """
    plain_target = target.with_name(f"{target.name}-plain")
    shutil.copytree(source, target)
    shutil.copytree(source, plain_target)
    packed: Parts = {}
    plain: Parts = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        done = pack(layer, tensor) if layer != name and tensor.ndim == 2 else None
        plain[name] = tensor if done is None else done[1]
        packed |= {name: tensor} if done is None else {f"{layer}.{part}": each for part, each in done[0].items()}
    save_file(packed, target / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": dict(quantisation)}))
    return plain_target
