"""Weights in AWQ's format, version "gemm", as AutoAWQ writes them.

A linear layer with K inputs and N outputs has qweight [K, N/8] and qzeros [groups, N/8], words of int32 that hold eight
numbers of 4 bits along the outputs, and scales [groups, N]. The outputs of a word stand in the order 0 2 4 6 1 3 5 7,
lowest bits first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from gpuworker.checkpoints.quantised import Found, QuantisedLinear, centred, refuse, setting, unpack, zeros_or_none
from gpuworker.checkpoints.stored_tensors import StoredTensors

_BITS: Final = 4
_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS: Final = ("qweight", "qzeros", "scales")


def find(stored: StoredTensors, config: Mapping[str, Any]) -> Found:
    """Return the packed weights of a checkpoint. Raises Unsupported, naming the field, for what cannot be read."""
    version = str(setting(config, "version", setting(config, "format", "gemm"))).lower()
    if version != "gemm":
        raise refuse("quantization_config.version", version, "expected gemm")
    bits = setting(config, "bits", setting(config, "w_bit", _BITS))
    if bits != _BITS:
        raise refuse("quantization_config.bits", bits, f"expected {_BITS}")
    found = Found()
    for name in stored:
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            found.weights[f"{layer}.weight"] = partial(_read, stored, layer)
            found.parts |= {f"{layer}.{each}" for each in _PARTS}
    return found


def _read(stored: StoredTensors, layer: str) -> QuantisedLinear:
    qweight, scales = stored[f"{layer}.qweight"].map(), stored[f"{layer}.scales"].map()
    values = _in_order(unpack(qweight, _BITS))  # [K, N]
    if f"{layer}.qzeros" in stored:
        zeros = centred(_in_order(unpack(stored[f"{layer}.qzeros"].map(), _BITS)), _BITS)  # [groups, N]
    else:
        zeros = torch.zeros(scales.shape, dtype=torch.int8)
    return QuantisedLinear(
        name=layer,
        bits=_BITS,
        group_size=values.shape[0] // scales.shape[0],
        values=centred(values, _BITS).t().contiguous(),
        scales=scales.t().float().contiguous(),
        zeros=zeros_or_none(zeros.t()),
    )


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    """Return [R, C] with the eight outputs of each word in their own order."""
    place = torch.tensor(_ORDER).argsort()
    return numbers.view(len(numbers), -1, len(_ORDER))[..., place].flatten(1)
