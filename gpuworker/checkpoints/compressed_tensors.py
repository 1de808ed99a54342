"""Weights in the formats of compressed-tensors, as LLM Compressor writes them.

A linear layer with K inputs and N outputs has weight_scale: one number, or [N, 1], or [N, groups] for groups along the
inputs, or one for each block of rows and columns; weight_zero_point of the same shape where zero is not 0; and
* pack-quantized: weight_packed [N, K · bits/32], words of int32 along the inputs, lowest bits first, of numbers plus
  2^(bits-1); weight_shape, N and K; weight_zero_point packed the same way along the outputs; weight_g_idx [K] if the
  inputs were reordered (act-order);
* int-quantized, float-quantized, naive-quantized: weight [N, K] in int8 or fp8.
Entries about activations and about the cache do not change the weights and are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from gpuworker.checkpoints.quantised import (
    Found,
    Packed,
    QuantisedLinear,
    centred,
    groups_or_none,
    refuse,
    scaled_floats,
    setting,
    unpack,
    zeros_or_none,
)
from gpuworker.checkpoints.stored_tensors import StoredTensors

_BITS: Final = (2, 4, 8)
_FORMATS: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_DENSE: Final = (None, "dense")
_PARTS: Final = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
# Calibrated scales of activations, of K and V, and of the output; Quire does not use them.
_NOT_FOLLOWED: Final = ("input_", "output_", "k_", "v_", "q_")
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_log = logging.getLogger(__name__)


def find(stored: StoredTensors, config: Mapping[str, Any]) -> Found:
    """Return the packed weights of a checkpoint. Raises Unsupported, naming the field, for what cannot be read."""
    _refuse_unknown(config)
    block, found = _block(config), Found()
    for name in stored:
        layer, _, part = name.rpartition(".")
        if part.startswith(_NOT_FOLLOWED) and part.endswith(("_scale", "_zero_point", "_global_scale", "_g_idx")):
            found.parts.add(name)
        elif part == "weight_scale":
            packed = f"{layer}.weight_packed" in stored
            read = partial(_read_packed, stored, layer) if packed else partial(_read_plain, stored, layer, block)
            found.weights[f"{layer}.weight"] = read
            found.parts |= {f"{layer}.{each}" for each in _PARTS}
    return found


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    path = "quantization_config"
    if setting(config, "format") not in (*_FORMATS, "mixed-precision", None):
        raise refuse(f"{path}.format", config["format"], f"expected one of {', '.join(_FORMATS)}")
    sparsity = setting(setting(config, "sparsity_config", {}), "format")
    if sparsity not in _DENSE:
        raise refuse(f"{path}.sparsity_config.format", sparsity, "only dense weights can be read")
    if setting(setting(config, "transform_config", {}), "config_groups"):
        why = "its activations must be transformed as well, which no model here does"
        raise refuse(f"{path}.transform_config", "not empty", why)
    for name, group in setting(config, "config_groups", {}).items():
        where, weights = f"{path}.config_groups.{name}", setting(group, "weights", {})
        if setting(group, "format", _FORMATS[0]) not in _FORMATS:
            raise refuse(f"{where}.format", group["format"], f"expected one of {', '.join(_FORMATS)}")
        bits, kind = setting(weights, "num_bits", 8), setting(weights, "type", "int")
        if (kind, bits) != ("float", 8) and (kind != "int" or bits not in _BITS):
            raise refuse(f"{where}.weights", f"{kind}{bits}", "expected int2, int4, int8 or float8")
        if setting(group, "input_activations"):
            _log.info("%s: the checkpoint quantises activations in %s too; only weights are", path, name)


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, where a group of layers has blocks; all have the same."""
    for group in setting(config, "config_groups", {}).values():
        found = setting(setting(group, "weights", {}), "block_structure")
        if found is not None:
            rows, columns = found.split("x") if isinstance(found, str) else found
            return int(rows), int(columns)
    return None


def _read_packed(stored: StoredTensors, layer: str) -> QuantisedLinear:
    packed, scales = stored[f"{layer}.weight_packed"].map(), stored[f"{layer}.weight_scale"].map()
    outputs, inputs = (int(size) for size in stored[f"{layer}.weight_shape"].map())
    # Layers may differ: their shapes tell the bits. A row is padded to whole words.
    bits = next((each for each in _BITS if -(-inputs * each // 32) == packed.shape[1]), 0)
    if not bits or len(packed) != outputs or packed.dtype != torch.int32:
        why = f"expected int32 words of {_BITS} bits for {outputs} outputs and {inputs} inputs"
        raise refuse(f"{layer}.weight_packed", tuple(packed.shape), why)
    zeros = None
    if f"{layer}.weight_zero_point" in stored:
        zeros = stored[f"{layer}.weight_zero_point"].map()
        if zeros.dtype == torch.int32 and zeros.shape != scales.shape:
            zeros = centred(unpack(zeros.t(), bits), bits)[:, :outputs].t()
    values = centred(unpack(packed, bits), bits)[:, :inputs].contiguous()
    groups = stored[f"{layer}.weight_g_idx"].map() if f"{layer}.weight_g_idx" in stored else None
    return _linear(layer, bits, values, scales, zeros, groups)


def _read_plain(stored: StoredTensors, layer: str, block: tuple[int, int] | None) -> Packed:
    """Return the weight of a layer that is stored as int8 or fp8."""
    values, scales = stored[f"{layer}.weight"].map(), stored[f"{layer}.weight_scale"].map()
    if values.dtype in _FLOAT8:
        return scaled_floats(layer, values, scales, block)
    if values.dtype != torch.int8:
        raise refuse(f"{layer}.weight", values.dtype, "expected int8 or float8 beside a weight_scale")
    zeros = stored[f"{layer}.weight_zero_point"].map() if f"{layer}.weight_zero_point" in stored else None
    groups = stored[f"{layer}.weight_g_idx"].map() if f"{layer}.weight_g_idx" in stored else None
    return _linear(layer, 8, values, scales, zeros, groups)


def _linear(
    layer: str,
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
) -> QuantisedLinear:
    outputs, inputs = values.shape
    by_output = _by_output(scales.float(), outputs, f"{layer}.weight_scale")
    group_size = -(-inputs // by_output.shape[1])
    if zeros is not None:
        zeros = zeros_or_none(_by_output(zeros, outputs, f"{layer}.weight_zero_point"))
    return QuantisedLinear(
        name=layer,
        bits=bits,
        group_size=group_size,
        values=values,
        scales=by_output,
        zeros=zeros,
        group_of=groups_or_none(group_of, inputs, group_size),
    )


def _by_output(numbers: torch.Tensor, outputs: int, name: str) -> torch.Tensor:
    """Return [N, groups] of one number, or [N], or [N, groups]."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(outputs, 1).contiguous()
    if len(numbers) != outputs:
        raise refuse(name, tuple(numbers.shape), f"expected one number, or groups of each of {outputs} outputs")
    return numbers.reshape(outputs, -1).contiguous()
