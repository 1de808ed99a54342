"""The choice between the native path and transformers, and the start-up test of the native path.

A model takes the native path under three conditions: the path knows every option of its configuration, the checkpoint
has the tensors, and a few of its layers compute what transformers computes from the same weights. Otherwise the model
runs on transformers, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from common.checkpoint.hub import checkpoint_directory
from common.errors import FieldViolation, InvalidConfig, Unsupported
from common.settings.options import ModelImpl
from common.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.native_backend import TYPES
from gpuworker.checkpoints.progress import telling_progress
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.devices import CACHE_DTYPES, dtype_name
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.hf.loader import (
    ModelSource,
    context_limit,
    precision_of,
    random_module,
    read_config,
)
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.precision import Precision
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights
from gpuworker.models.llama.linears import KINDS, IntegersOf, LinearReader
from gpuworker.models.llama.pack import pack_model
from gpuworker.models.llama.reference import WeightsOf, reference_part, tested_layers
from gpuworker.models.llama.spec import LlamaSpec, llama_spec, why_not_llama
from gpuworker.models.llama.weights import TensorOf
from gpuworker.models.self_test import self_test
from gpuworker.native import library as native

Backend = Callable[[KvCache], AttentionBackend]
LlamaModel = LlamaCpuModel | LlamaGpuModel
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """Gives the weights of a model by name: as tensors, or as the integers that a checkpoint stores."""

    tensor: TensorOf
    integers: IntegersOf = lambda _: None


def open_native(
    source: ModelSource, device: torch.device, model_impl: ModelImpl, backend: Backend
) -> tuple[LlamaModel, KvGeometry] | None:
    """Return a model that passed its test on the native path, and the shape of its K/V; None: it runs on transformers.

    Says in the log which path a model takes and why. Raises InvalidConfig when the checkpoint cannot be read, or when
    `model_impl` asks for the native path and the model cannot take it.
    """
    directory = checkpoint_directory(source.model)
    config = read_config(directory)
    reason = "that was asked for" if model_impl == "transformers" else why_not_native(config, source, device)
    if reason is None:
        try:
            opened = _open(directory, config, source, device, backend)
        except Unsupported as error:
            reason = str(error)
        else:
            path = "native CPU" if isinstance(opened[0], LlamaCpuModel) else "native GPU"
            _log.info("%s runs on the %s path, in %s", config.model_type, path, dtype_name(opened[0].dtype))
            return opened
    if model_impl == "native":
        raise InvalidConfig(FieldViolation("--model-impl", f"native, but the model cannot take that path: {reason}"))
    _log.info("%s runs on transformers: %s", config.model_type, reason)
    return None


def why_not_native(config: PretrainedConfig, source: ModelSource, device: torch.device) -> str | None:
    """Return why a model cannot take the native path here, before any of its weights is read; None when it can."""
    precision = precision_of(source, config)
    if device.type not in ("cpu", "cuda"):
        return f"the native paths are for CPUs and CUDA, not for {device}"
    if (reason := why_not_llama(config)) is not None:
        return reason
    if device.type == "cuda":
        asked = precision.quantization
        return None if asked in ("none", "auto") else f"on CUDA linears are not quantised at start, to {asked} or else"
    if precision.dtype not in KINDS:
        return (
            f"the native path computes in {' or '.join(map(dtype_name, KINDS))}, not in {dtype_name(precision.dtype)}"
        )
    if CACHE_DTYPES[precision.kv_dtype] not in TYPES:
        return f"native attention has no cache of {precision.kv_dtype}"
    return "the native library is not there" if native.best() is None else None


def _open(
    directory: Path, config: PretrainedConfig, source: ModelSource, device: torch.device, backend: Backend
) -> tuple[LlamaModel, KvGeometry]:
    """Load a model and test it. Raises Unsupported, with the reason, when the test fails."""
    spec, precision = llama_spec(config), precision_of(source, config)
    assert spec is not None
    load = load_native if device.type == "cpu" else load_on_gpu
    try:
        with telling_progress(directory):
            weights = _reader(directory, config, source, precision, device)
            model, weights_of = load(config, spec, weights, precision, device)
            part: torch.nn.Module = reference_part(config, spec, weights.tensor, weights_of, precision.dtype)
            reference = TransformersModel(cast("PreTrainedModel", part.to(device)), precision.kv_dtype)
    except (KeyError, OSError, ValueError, RuntimeError) as error:
        raise Unsupported(f"its weights are not what the native path expects: {error}") from error
    rough = isinstance(model, LlamaCpuModel) and model.packed.rounds_activations
    geometry = self_test(reference, backend, model.only(tested_layers(spec)), rough=rough)
    widest = 0 if None in spec.windows else max(window or 0 for window in spec.windows)
    return model, replace(geometry, num_layers=spec.num_layers, window=widest)


def load_native(
    config: PretrainedConfig, spec: LlamaSpec, weights: Weights, precision: Precision, device: torch.device
) -> tuple[LlamaCpuModel, WeightsOf]:
    """Return a model for the native library, and the weights that it multiplies by."""
    library = native.best()
    assert library is not None
    reader = LinearReader(weights.tensor, weights.integers, precision.dtype, precision.quantization)
    model = LlamaCpuModel(config, pack_model(library, spec, reader), precision.kv_dtype)
    _log.info("%s: %s", config.model_type, model.packed.kinds_in_words)
    return model, reader.dequantised


def load_on_gpu(
    config: PretrainedConfig, spec: LlamaSpec, weights: Weights, precision: Precision, device: torch.device
) -> tuple[LlamaGpuModel, WeightsOf]:
    """Return a model in torch's products and Triton's kernels, and the weights that it multiplies by."""
    fused = fused_weights(spec, weights.tensor, precision.dtype, device)
    model = LlamaGpuModel(config, fused, precision.kv_dtype, context_limit(config))
    return model, lambda linear: [weights.tensor(name) for name in linear.weights]


def _reader(
    directory: Path, config: PretrainedConfig, source: ModelSource, precision: Precision, device: torch.device
) -> Weights:
    """Return the source of a model's weights: the files, or the random weights that transformers would make."""
    if source.load_format == "dummy":
        state = random_module(config, precision.dtype, source.seed, device).state_dict()
        return Weights(state.__getitem__)
    checkpoint = Checkpoint(directory)
    return Weights(lambda name: checkpoint.tensor(name, precision.dtype), checkpoint.integers)
