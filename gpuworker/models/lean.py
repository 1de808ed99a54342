"""The choice of the lean path: which models take it, and the start-up test that it computes what they are.

The test needs the model as transformers runs it, but not all of it: layers differ in nothing but their window. So a
model of the first two layers, and of one layer for each other window, is made of the checkpoint's own weights, on pages
of its files, and the same layers of the lean model are held to it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from common.errors import FieldViolation, InvalidConfig, Unsupported
from common.hub import checkpoint_directory
from common.options import Execution
from common.types import KvGeometry
from gpuworker.attention import AttentionBackend
from gpuworker.devices import CACHE_DTYPES, dtype_name
from gpuworker.kernels import native
from gpuworker.kernels.cpu_attention import TYPES
from gpuworker.kv_cache import KvCache
from gpuworker.models.checkpoint import Checkpoint
from gpuworker.models.hosted import HostedModel
from gpuworker.models.lean_gpu import LeanGpuModel
from gpuworker.models.lean_gpu_weights import fused_weights
from gpuworker.models.lean_pack import KINDS, pack_model
from gpuworker.models.lean_spec import LeanSpec, lean_spec, why_not_lean
from gpuworker.models.lean_weights import TensorOf, tensor_names
from gpuworker.models.loader import (
    ModelSource,
    context_limit,
    make_module,
    precision_of,
    random_module,
    read_config,
)
from gpuworker.models.native_model import NativeModel
from gpuworker.models.precision import Precision
from gpuworker.models.progress import telling_progress
from gpuworker.models.self_test import self_test

Backend = Callable[[KvCache], AttentionBackend]
LeanModel = NativeModel | LeanGpuModel
_log = logging.getLogger(__name__)


def open_lean(
    source: ModelSource, device: torch.device, execution: Execution, backend: Backend
) -> tuple[LeanModel, KvGeometry] | None:
    """Return a model that has passed its test on the lean path, and the shape of its K/V; None: it is to run hosted.

    Says in the log which path a model takes and why. Raises InvalidConfig when the checkpoint cannot be read, or when
    `execution` asks for the lean path and the model cannot take it.
    """
    directory = checkpoint_directory(source.model)
    config = read_config(directory)
    reason = "that was asked for" if execution == "hosted" else why_hosted(config, source, device)
    if reason is None:
        try:
            opened = _open(directory, config, source, device, backend)
        except Unsupported as error:
            reason = str(error)
        else:
            path = "native" if isinstance(opened[0], NativeModel) else "lean GPU"
            _log.info("%s runs on the %s path, in %s", config.model_type, path, dtype_name(opened[0].dtype))
            return opened
    if execution == "lean":
        raise InvalidConfig(FieldViolation("--execution", f"lean, but the model cannot take that path: {reason}"))
    _log.info("%s runs hosted: %s", config.model_type, reason)
    return None


def why_hosted(config: PretrainedConfig, source: ModelSource, device: torch.device) -> str | None:
    """Return why a model cannot take the lean path here, before any of its weights is read; None when it can."""
    precision = precision_of(source, config)
    if device.type not in ("cpu", "cuda"):
        return f"the lean paths are for CPUs and CUDA, not for {device}"
    if (reason := why_not_lean(config)) is not None:
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
) -> tuple[LeanModel, KvGeometry]:
    """Load a model and test it. Raises Unsupported, saying why, where it does not come out right."""
    spec, precision = lean_spec(config), precision_of(source, config)
    assert spec is not None
    load = load_native if device.type == "cpu" else load_on_gpu
    try:
        with telling_progress(directory):
            tensor_of = _reader(directory, config, source, precision, device)
            model = load(config, tensor_of, precision, device)
            layers = tested_layers(spec)
            part: torch.nn.Module = _part(config, spec, tensor_of, layers, precision)
            reference = HostedModel(cast("PreTrainedModel", part.to(device)), precision.kv_dtype)
    except (KeyError, OSError, ValueError, RuntimeError) as error:
        raise Unsupported(f"its weights are not what the lean path expects: {error}") from error
    geometry = self_test(reference, backend, model.only(layers))
    widest = 0 if None in spec.windows else max(window or 0 for window in spec.windows)
    return model, replace(geometry, num_layers=spec.num_layers, window=widest)


def load_native(
    config: PretrainedConfig, tensor_of: TensorOf, precision: Precision, device: torch.device
) -> NativeModel:
    """Return a model of the family for the native library."""
    spec, library = lean_spec(config), native.best()
    assert spec is not None
    assert library is not None
    return NativeModel(config, pack_model(library, spec, tensor_of, precision.dtype), precision.kv_dtype)


def load_on_gpu(
    config: PretrainedConfig, tensor_of: TensorOf, precision: Precision, device: torch.device
) -> LeanGpuModel:
    """Return a model of the family in torch's products and Triton's kernels."""
    spec = lean_spec(config)
    assert spec is not None
    weights = fused_weights(spec, tensor_of, precision.dtype, device)
    return LeanGpuModel(config, weights, precision.kv_dtype, context_limit(config))


def tested_layers(spec: LeanSpec) -> tuple[int, ...]:
    """Return the layers that the test runs: the first two, and the first of each window."""
    first_of_window = {spec.windows.index(window) for window in spec.windows}
    return tuple(sorted({*range(min(2, spec.num_layers)), *first_of_window}))


def _reader(
    directory: Path, config: PretrainedConfig, source: ModelSource, precision: Precision, device: torch.device
) -> TensorOf:
    """Return what gives a model's tensors: those of the files, or those that the hosted path would draw."""
    if source.load_format == "dummy":
        drawn = random_module(config, precision.dtype, source.seed, device).state_dict()
        return drawn.__getitem__
    checkpoint = Checkpoint(directory)
    return lambda name: checkpoint.tensor(name, precision.dtype)


def _part(
    config: PretrainedConfig, spec: LeanSpec, tensor_of: TensorOf, layers: Sequence[int], precision: Precision
) -> PreTrainedModel:
    """Return the model as transformers runs it, of some of its layers."""
    part = copy.deepcopy(config)
    part.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        part.layer_types = [config.layer_types[layer] for layer in layers]
    names = tensor_names(replace(spec, num_layers=len(layers)))
    return make_module(part, {name: tensor_of(_name_in_whole(name, layers)) for name in names}, precision.dtype)


def _name_in_whole(name: str, layers: Sequence[int]) -> str:
    """Return what a tensor of the part is called in the whole model: its layer has another number there."""
    head, separator, rest = name.partition(".layers.")
    number, dot, tail = rest.partition(".")
    return f"{head}{separator}{layers[int(number)]}{dot}{tail}" if separator else name
