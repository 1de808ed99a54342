"""Weights in GPTQ's format, as AutoGPTQ and GPTQModel write them.

A linear layer with K inputs and N outputs has, in words of int32 that hold 32 / bits numbers, lowest bits first:
qweight [K · bits/32, N], packed along the inputs; qzeros [groups, N · bits/32], packed along the outputs;
scales [groups, N]; g_idx [K], the group of each input. In the first version of the format ("gptq") a stored zero point
is one less than what is meant, in the second ("gptq_v2") it is what is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from gpuworker.checkpoints.quantised import Found, QuantisedLinear, centred, groups_or_none, refuse, setting, unpack
from gpuworker.checkpoints.quantised import zeros_or_none as zeros_of
from gpuworker.checkpoints.stored_tensors import StoredTensors

_BITS: Final = (2, 4, 8)
_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
# What is added to a stored zero point.
_FORMATS: Final = {"gptq": 1, "gptq_v2": 0}


def find(stored: StoredTensors, config: Mapping[str, Any]) -> Found:
    """Return the packed weights of a checkpoint. Raises Unsupported, naming the field, for what cannot be read."""
    version = str(setting(config, "checkpoint_format", setting(config, "format", "gptq"))).lower()
    if version not in _FORMATS or setting(config, "is_marlin_format", False):
        why = f"expected {' or '.join(_FORMATS)}: the others are laid out for one kernel of one device"
        raise refuse("quantization_config.checkpoint_format", version, why)
    if setting(config, "bits") not in _BITS:
        raise refuse("quantization_config.bits", config.get("bits"), f"expected one of {_BITS}")
    if str(setting(config, "pack_dtype", "int32")) != "int32":
        raise refuse("quantization_config.pack_dtype", config["pack_dtype"], "expected int32")
    found = Found()
    for name in stored:
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            found.weights[f"{layer}.weight"] = partial(_read, stored, layer, _FORMATS[version])
            found.parts |= {f"{layer}.{each}" for each in _PARTS}
    return found


def _read(stored: StoredTensors, layer: str, add: int) -> QuantisedLinear:
    qweight, qzeros, scales = (stored[f"{layer}.{part}"].map() for part in ("qweight", "qzeros", "scales"))
    groups, outputs = scales.shape
    # Layers may differ (GPTQModel's "dynamic"): the zero points tell the bits.
    bits = 32 * qzeros.shape[1] // outputs
    if bits not in _BITS:
        raise refuse(f"{layer}.qzeros", tuple(qzeros.shape), f"{outputs} outputs of {bits} bits; expected {_BITS}")
    inputs = qweight.shape[0] * 32 // bits
    group_size = -(-inputs // groups)
    stored_groups = stored[f"{layer}.g_idx"].map() if f"{layer}.g_idx" in stored else None
    # [groups, N]; one more than what is stored may be 2^bits, which int16 still holds.
    zeros = unpack(qzeros, bits).to(torch.int16) + (add - (1 << bits - 1))
    return QuantisedLinear(
        name=layer,
        bits=bits,
        group_size=group_size,
        values=centred(unpack(qweight.t(), bits), bits),
        scales=scales.t().float().contiguous(),
        zeros=zeros_of(zeros.t()),
        group_of=groups_or_none(stored_groups, inputs, group_size),
    )
