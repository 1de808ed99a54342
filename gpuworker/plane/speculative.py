"""Refuses --speculative where verified drafts could change tokens, or where none is sampled."""

from __future__ import annotations

import torch

from common.checkpoint.pooling import Pooling
from common.contracts.errors import FieldViolation, InvalidConfig
from gpuworker.memory.devices import dtype_name
from gpuworker.models.choose import LlamaModel
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.cpu_model import LlamaCpuModel


def refuse_unequal_drafts(kind: str, model: TransformersModel | LlamaModel, pooling: Pooling | None) -> None:
    """Raise InvalidConfig unless the tokens of a step with drafts are those of steps without."""
    why = _why_not(model, pooling)
    if why:
        raise InvalidConfig(FieldViolation("--speculative", f"is {kind}, and {why}; leave it out"))


def _why_not(model: TransformersModel | LlamaModel, pooling: Pooling | None) -> str:
    if pooling is not None:
        return "the workers embed prompts: no token is sampled that could be guessed"
    if model.device.type != "cpu":
        return f"the device is {model.device}, on which drafts have never been verified; use --device cpu"
    if isinstance(model, LlamaCpuModel) or model.dtype == torch.float32:
        return ""
    return (
        f"the model runs on transformers' code in {dtype_name(model.dtype)}, where a step of more rows rounds "
        "otherwise and could sample other tokens; use --dtype float32"
    )
