"""The weights of a checkpoint under their plain names, in any stored format.

This module reads the quantisation entries of config.json, and returns each weight unchanged, dequantised, or as
integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from common.checkpoint.files import read_object
from common.checkpoint.wrappers import WRAPPERS, language_model, language_tensor
from gpuworker.checkpoints import awq as quantised_awq
from gpuworker.checkpoints import compressed_tensors as quantised_compressed
from gpuworker.checkpoints import fp8 as quantised_fp8
from gpuworker.checkpoints import gguf
from gpuworker.checkpoints import gptq as quantised_gptq
from gpuworker.checkpoints import mxfp4 as quantised_mxfp4
from gpuworker.checkpoints.quantised import Found, QuantisedLinear, refuse
from gpuworker.checkpoints.stored_tensors import StoredTensor, StoredTensors

# The experts of a layer as one tensor.
_EXPERTS: Final = re.compile(r".+\.mlp\.experts\.(?:gate_up|down)_proj")
_READERS: Final[Mapping[str, Callable[[StoredTensors, Mapping[str, Any]], Found]]] = {
    "gptq": quantised_gptq.find,
    "awq": quantised_awq.find,
    "compressed-tensors": quantised_compressed.find,
    "fp8": quantised_fp8.find,
    "mxfp4": quantised_mxfp4.find,
}


class Checkpoint:
    """Maps names to weights; reads nothing before a weight is requested. Several threads may read at once.

    `format` is the method of quantisation, "" for none.
    """

    def __init__(self, directory: Path) -> None:
        """Read the headers. Raises InvalidConfig for files other than safetensors, Unsupported for unknown formats."""
        if gguf.is_gguf(directory):
            self.format = "gguf"
            self.stored, self._found = gguf.find(directory)
            return
        self.stored = _stored(directory)
        config = quantisation_of(directory)
        self.format = str(config.get("quant_method", "")) if config else ""
        self._found = Found()
        if config:
            if self.format not in _READERS:
                why = f"expected one of {', '.join(_READERS)}, or weights that are not quantised"
                raise refuse("quantization_config.quant_method", self.format, why)
            self._found = _READERS[self.format](self.stored, config)

    def __iter__(self) -> Iterator[str]:
        plain = (name for name in self.stored if name not in self._found.parts and name not in self._found.weights)
        return iter(sorted([*plain, *self._found.weights]))

    def __contains__(self, name: object) -> bool:
        return name in self._found.weights or (name in self.stored and name not in self._found.parts)

    @property
    def packed(self) -> int:
        """How many weights are stored quantised."""
        return len(self._found.weights)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight: a quantised one in `dtype`, another as stored, on pages of its file. Raises KeyError."""
        if name in self._found.weights:
            return self._found.weights[name]().dequantise(dtype)
        return self.stored[name].map()

    def integers(self, name: str) -> QuantisedLinear | None:
        """Return a weight as the integers that are stored; None where it is not stored so."""
        read = self._found.weights.get(name)
        packed = read() if read is not None else None
        return packed if isinstance(packed, QuantisedLinear) else None


def quantisation_of(directory: Path) -> dict[str, Any] | None:
    """Return the quantisation entry of a checkpoint's configuration; None when it is not quantised.

    The entry is in config.json, at the top or under the text model of several; older GPTQ has a file of its own.
    """
    config = _json(directory / "config.json")
    for part in (config, config.get("text_config") or {}):
        found = part.get("quantization_config") or part.get("compression_config")
        if found:
            return {"quant_method": "compressed-tensors"} | found if "compression_config" in part else dict(found)
    alone = _json(directory / "quantize_config.json")
    return {"quant_method": "gptq"} | alone if alone else None


def _stored(directory: Path) -> StoredTensors:
    """Return the tensors of a folder; of a model of several media those of its language model, by their plain names."""
    stored, config = StoredTensors(directory), _json(directory / "config.json")
    if config.get("model_type") not in WRAPPERS:
        return stored
    found = {plain: stored[name] for name in stored if (plain := language_tensor(name)) is not None}
    return StoredTensors(directory, _with_outputs_first(found, language_model(config) or {}))


def _with_outputs_first(found: dict[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return tensors in which the experts of a layer, [experts, outputs, inputs], have the outputs first.

    Files of qwen3_vl_moe have the inputs first, as its older code multiplied them. A tensor that is not square tells.
    """
    experts = [name for name in found if _EXPERTS.fullmatch(name) and len(found[name].shape) == 3]
    for name in experts:
        _, first, last = found[name].shape
        if first != last:
            is_right = (first if name.endswith("down_proj") else last) == config.get("hidden_size")
            return found if is_right else found | {each: replace(found[each], transposed=True) for each in experts}
    return found


def _json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
