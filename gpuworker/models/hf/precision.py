"""The precision of a model once the options are resolved: its activations, its K/V cache and its linears."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.contracts.errors import FieldViolation, InvalidConfig
from gpuworker.memory.devices import CACHE_DTYPES, pick_cache_dtype, pick_dtype

QUANTIZATIONS = ("none", "int8", "int4", "w8a8", "auto")


@dataclass(frozen=True, slots=True)
class Precision:
    """The types that a model is loaded in.

    `dtype` is the type of activations and of every weight that is not quantised. `kv_dtype` is a key of
    `gpuworker.memory.devices.CACHE_DTYPES`. `quantization` is one of `QUANTIZATIONS` and says how linears hold their
    weights ("int8" and "int4": weights alone; "w8a8": activations too; "auto": by shape, where it gains; "none": in
    `dtype`).
    """

    dtype: torch.dtype
    kv_dtype: str
    quantization: str = "none"

    def __post_init__(self) -> None:
        """Refuse values that no option gives: they are a mistake of the caller."""
        if self.kv_dtype not in CACHE_DTYPES or self.quantization not in QUANTIZATIONS:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} or quantization {self.quantization!r} is unknown")


def resolve_precision(
    dtype: str, kv_cache_dtype: str, quantization: str, of_checkpoint: torch.dtype | None
) -> Precision:
    """Return the precision that options ask for; `of_checkpoint` is what "auto" of `dtype` stands for.

    Raises InvalidConfig for an unknown name.
    """
    if quantization not in QUANTIZATIONS:
        what = f"{quantization!r}; expected one of {', '.join(QUANTIZATIONS)}"
        raise InvalidConfig(FieldViolation("--quantization", what))
    of_model = pick_dtype(dtype, of_checkpoint)
    return Precision(of_model, pick_cache_dtype(kv_cache_dtype, of_model), quantization)
