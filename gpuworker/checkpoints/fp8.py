"""Weights in fp8 with a scale for each block, as DeepSeek and Qwen publish theirs.

A linear layer with K inputs and N outputs has weight [N, K] in fp8 and weight_scale_inv, one number for each block of
weight_block_size rows and columns, or one in all: weight = stored · weight_scale_inv.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from gpuworker.checkpoints.quantised import Found, ScaledFloats, refuse, scaled_floats, setting
from gpuworker.checkpoints.stored_tensors import StoredTensors

_SCALE: Final = "weight_scale_inv"
_PARTS: Final = (_SCALE, "input_scale", "activation_scale")


def find(stored: StoredTensors, config: Mapping[str, Any]) -> Found:
    """Return the packed weights of a checkpoint. Raises Unsupported, naming the field, for what cannot be read."""
    block = setting(config, "weight_block_size")
    if block is not None and len(block) != 2:
        raise refuse("quantization_config.weight_block_size", block, "expected two numbers, rows and columns")
    found = Found()
    for name in stored:
        layer, _, part = name.rpartition(".")
        if part == _SCALE:
            found.weights[f"{layer}.weight"] = partial(_read, stored, layer, block)
        if part in _PARTS:
            found.parts.add(name)
    return found


def _read(stored: StoredTensors, layer: str, block: tuple[int, int] | None) -> ScaledFloats:
    return scaled_floats(layer, stored[f"{layer}.weight"].map(), stored[f"{layer}.{_SCALE}"].map(), block)
