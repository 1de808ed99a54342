"""The choice between the native path and transformers, and the start-up test of the native path.

A model takes the native path under three conditions. The path supports every option of its configuration, and the
checkpoint has the tensors. A few of its layers compute what other code computes from the same weights (`reference`).
Otherwise the model runs on transformers, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.checkpoint.files import read_config
from common.checkpoint.hub import checkpoint_directory
from common.checkpoint.wrappers import WRAPPERS
from common.contracts.errors import FieldViolation, InvalidConfig, Unsupported
from common.contracts.types import KvGeometry
from common.settings.options import ModelImpl
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.native_backend import TYPES
from gpuworker.checkpoints.progress import telling_progress
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.devices import CACHE_DTYPES, dtype_name
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import LayerShape, geometry_of, reach_of, with_groups, with_states
from gpuworker.models.checkpoint_test import follow_checkpoints, with_checkpoints
from gpuworker.models.hf.loader import (
    ModelSource,
    context_limit,
    precision_of,
    random_module,
)
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.precision import Precision
from gpuworker.models.hf.unread import unread_entries
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights
from gpuworker.models.llama.linears import IntegersOf, LinearReader
from gpuworker.models.llama.pack import pack_model
from gpuworker.models.llama.plain_config import PlainConfig, plain_config
from gpuworker.models.llama.reference import TorchReference, WeightsOf, reference_part, tested_layers
from gpuworker.models.llama.shards import Place, Shard, ShardReader, why_not_sharded
from gpuworker.models.llama.spec import LlamaSpec, llama_spec, why_not_llama
from gpuworker.models.llama.weights import TensorOf, with_merged_experts, without_prefix
from gpuworker.models.self_test import SHORTEST, follow_self_test, self_test
from gpuworker.models.threshold_test import beyond_thresholds
from gpuworker.native import library as native
from gpuworker.native.ranks import BoardSizes, RankBoard, RankMemory, StepSizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Backend = Callable[[KvCache], AttentionBackend]
LlamaModel = LlamaCpuModel | LlamaGpuModel
TENSOR_PARALLEL = "--tensor-parallel-size"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that run a model together, tensor parallel: this process's place among them, and what they share."""

    place: Place
    board: RankBoard
    sizes: StepSizes

    def memory(self, shard: Shard) -> RankMemory:
        spec, place = shard.whole, self.place
        sizes = BoardSizes(self.sizes, spec.hidden_size, spec.vocab_size, place.size)
        return RankMemory(self.board, place.rank, sizes, shard.tokens)


@dataclass(frozen=True, slots=True)
class Weights:
    """Gives the weights of a model by name: as tensors, or as the integers that a checkpoint stores."""

    tensor: TensorOf
    integers: IntegersOf = lambda _: None


def open_native(
    source: ModelSource,
    device: torch.device,
    model_impl: ModelImpl,
    backend: Backend,
    block_size: int = 0,
    checkpoints: bool = False,
    ranks: Ranks | None = None,
) -> tuple[LlamaModel, KvGeometry] | None:
    """Return a model that passed its test on the native path, and the shape of its K/V; None: it runs on transformers.

    With a block size its layers may be groups, and with `checkpoints` its states have one of their own. With `ranks`
    the model and its K/V are what is this rank's. All ranks call this at once, for the test takes all of them.
    Says in the log which path a model takes and why. Raises InvalidConfig when the checkpoint cannot be read, or when
    `model_impl` asks for the native path and the model cannot take it.
    """
    directory = checkpoint_directory(source.model)
    config = _config(directory, source, device, model_impl)
    _warn_of_unread(directory, config)
    if (whole := read_config(directory).get("model_type")) in WRAPPERS:
        _log.info("of %s its language model, a %s, is served: pictures and sound are refused", whole, config.model_type)
    reason = "that was asked for" if model_impl == "transformers" else why_not_native(config, source, device)
    if reason is None:
        try:
            opened = _open(config, source, device, backend, block_size, checkpoints, ranks)
        except Unsupported as error:
            reason = str(error)
        else:
            path = "native CPU" if isinstance(opened[0], LlamaCpuModel) else "native GPU"
            _log.info("%s runs on the %s path, in %s", config.model_type, path, dtype_name(opened[0].dtype))
            return opened
    if ranks is not None:
        what = f"is {ranks.place.size}, and the native path alone runs on several ranks: {reason}; leave it out"
        raise InvalidConfig(FieldViolation(TENSOR_PARALLEL, what))
    if model_impl == "native":
        raise InvalidConfig(FieldViolation("--model-impl", f"native, but the model cannot take that path: {reason}"))
    _log.info("%s runs on transformers: %s", config.model_type, reason)
    return None


def refuse_unshardable(source: ModelSource, device: torch.device, size: int) -> None:
    """Raise InvalidConfig for a model that so many ranks cannot run, before any of them starts."""
    config = _config(checkpoint_directory(source.model), source, device, "auto")
    why = why_not_native(config, source, device)
    if why is not None or device.type != "cpu":
        why = why or f"{device} is not a CPU"
        what = f"is {size}, and only the native path of a CPU runs on several ranks: {why}; leave it out"
        raise InvalidConfig(FieldViolation(TENSOR_PARALLEL, what))
    spec = llama_spec(config)
    assert spec is not None
    if (why := why_not_sharded(spec, size)) is not None:
        raise InvalidConfig(FieldViolation(TENSOR_PARALLEL, f"is {size}, which {why}"))


def _config(directory: Path, source: ModelSource, device: torch.device, model_impl: ModelImpl) -> PretrainedConfig:
    """Return the configuration of the checkpoint. transformers reads it, unless no part of the start needs it."""
    needed = model_impl == "transformers" or device.type != "cpu" or source.load_format == "dummy" or source.pooled
    return (None if needed else plain_config(directory)) or source.config(directory)


def _warn_of_unread(directory: Path, config: PretrainedConfig) -> None:
    """Name the entries that change a model's numbers and that nothing reads; a plain configuration has none."""
    if not isinstance(config, PlainConfig) and (unread := unread_entries(directory, config)):
        what = "%s/config.json has entries that nothing reads, and that may change the model's numbers: %s"
        _log.warning(what, directory, ", ".join(unread))


def why_not_native(config: PretrainedConfig, source: ModelSource, device: torch.device) -> str | None:
    """Return why a model cannot take the native path here, before any of its weights is read; None when it can."""
    precision = native_precision(source, config, device)
    if device.type not in ("cpu", "cuda"):
        return f"the native paths are for CPUs and CUDA, not for {device}"
    if (reason := why_not_llama(config)) is not None:
        return reason
    if device.type == "cuda":
        return _why_not_on_cuda(config, precision)
    if CACHE_DTYPES[precision.kv_dtype] not in TYPES:
        return f"native attention has no cache of {precision.kv_dtype}"
    return "the native library is not there" if native.best() is None else None


def _why_not_on_cuda(config: PretrainedConfig, precision: Precision) -> str | None:
    spec, asked = llama_spec(config), precision.quantization
    if spec is not None and spec.keeping:
        return f"on CUDA no layer of a {config.model_type} that keeps a state is run natively"
    if spec is not None and spec.gemma is not None:
        return f"on CUDA no {config.model_type} is run natively"
    return None if asked in ("none", "auto") else f"on CUDA linears are not quantised at start, to {asked} or else"


def native_precision(source: ModelSource, config: PretrainedConfig, device: torch.device) -> Precision:
    """Return the precision of the native path. A CPU computes float16 in float32, to which each weight widens exactly.

    The weights of linears stay in float16 and are widened as they are read. K and V are kept in float32 too, unless
    the options name their type.
    """
    asked = precision_of(source, config)
    if device.type != "cpu" or asked.dtype != torch.float16:
        return asked
    kv_dtype = dtype_name(torch.float32) if source.kv_cache_dtype == "auto" else asked.kv_dtype
    return replace(asked, dtype=torch.float32, kv_dtype=kv_dtype)


def _open(
    config: PretrainedConfig,
    source: ModelSource,
    device: torch.device,
    backend: Backend,
    block_size: int,
    checkpoints: bool,
    ranks: Ranks | None,
) -> tuple[LlamaModel, KvGeometry]:
    """Load a model and test it. Raises Unsupported, with the reason, when a test fails."""
    precision, directory = native_precision(source, config, device), checkpoint_directory(source.model)
    try:
        with telling_progress(directory):
            weights = _reader(directory, config, source, precision, device)
            loaded = _load(config, weights, precision, device, ranks)
    except (KeyError, OSError, ValueError, RuntimeError) as error:
        raise Unsupported(f"its weights are not what the native path expects: {error}") from error
    if precision.dtype != precision_of(source, config).dtype:
        _log.info("%s: float16 is computed in float32, K and V are kept in %s", config.model_type, precision.kv_dtype)
    if isinstance(loaded.model, LlamaCpuModel):
        _log.info("%s: %s", config.model_type, loaded.model.packed.kinds_in_words)
    geometry = _tested(loaded, backend, block_size)
    checkpoints &= block_size > 0
    if checkpoints:
        part = loaded.model.only(tested_layers(loaded.spec))
        if loaded.reference is None:
            follow_checkpoints(part, backend, geometry, block_size)
        else:
            with_checkpoints(loaded.reference, backend, geometry, block_size, part)
    if loaded.reference is not None:
        beyond_thresholds(config, lambda tiny, length: _tested(_tiny(tiny, device), backend, block_size, length))
    whole = _geometry(loaded.own_spec, geometry.dtype, context_limit(config), block_size)
    states = loaded.model.states
    if checkpoints and states is not None:
        whole = with_states(whole, states.layers, states.bytes_a_sequence, block_size)
    return loaded.model, whole


def _geometry(spec: LlamaSpec, dtype: str, limit: int, block_size: int) -> KvGeometry:
    """Return the shape of the K/V of a whole model."""
    windows = {layer: spec.windows[layer] for layer in (*spec.attending, *spec.sources)}
    widest = 0 if None in windows.values() else max(window or 0 for window in windows.values())
    heads = {layer: spec.heads(layer) for layer in spec.attending}
    whole = geometry_of({layer: LayerShape(count, dim, dim) for layer, (dim, count) in heads.items()}, dtype, widest)
    if not block_size:
        return whole
    reaches = {layer: reach_of(window, None, limit) for layer, window in windows.items()}
    return with_groups(whole, reaches, spec.sources, block_size)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A native model, and the model of `tested_layers` on the same weights that transformers runs.

    `spec` is that of the whole model, `own_spec` that of what is this rank's. Rank 0 alone compares, with `reference`.
    """

    spec: LlamaSpec
    own_spec: LlamaSpec
    model: LlamaModel
    reference: TransformersModel | TorchReference | None


def _load(
    config: PretrainedConfig,
    weights: Weights,
    precision: Precision,
    device: torch.device,
    ranks: Ranks | None = None,
) -> _Loaded:
    spec = llama_spec(config)
    assert spec is not None
    model: LlamaModel
    if device.type == "cpu":
        model, weights_of = load_native(config, spec, weights, precision, device, ranks)
    else:
        model, weights_of = load_on_gpu(config, spec, weights, precision, device)
    part = None
    if ranks is None or not ranks.place.rank:
        part = reference_part(config, spec, weights.tensor, weights_of, precision.dtype, device, precision.kv_dtype)
    own = model.packed.spec if isinstance(model, LlamaCpuModel) else spec
    return _Loaded(spec, own, model, part)


def _tested(loaded: _Loaded, backend: Backend, block_size: int, length: int = SHORTEST) -> KvGeometry:
    model = loaded.model
    rough = isinstance(model, LlamaCpuModel) and model.packed.rounds_activations
    layers = tested_layers(loaded.spec)
    part, own = model.only(layers), None
    if loaded.own_spec is not loaded.spec:
        own = _geometry(loaded.own_spec.only(layers), model.kv_dtype, context_limit(model.config), block_size)
    if loaded.reference is None:
        assert own is not None, "the first rank compares"
        follow_self_test(part, backend, own)
        return own
    return self_test(loaded.reference, backend, part, rough=rough, length=length, block_size=block_size, own=own)


def _tiny(config: PretrainedConfig, device: torch.device) -> _Loaded:
    """Return a model with random weights in float32."""
    precision = Precision(torch.float32, dtype_name(torch.float32))
    return _load(config, _random_weights(config, precision.dtype, 0, device), precision, device)


def load_native(
    config: PretrainedConfig,
    spec: LlamaSpec,
    weights: Weights,
    precision: Precision,
    device: torch.device,
    ranks: Ranks | None = None,
) -> tuple[LlamaCpuModel, WeightsOf]:
    """Return a model for the native library, or this rank's part of it, and the weights that all ranks multiply by."""
    library = native.best()
    assert library is not None
    reader = LinearReader(weights.tensor, weights.integers, precision.dtype, precision.quantization)
    if ranks is not None:
        shard = Shard(spec, ranks.place)
        packed = pack_model(library, shard.spec, ShardReader(reader, shard))
        model = LlamaCpuModel(config, packed, precision.kv_dtype, ranks=ranks.memory(shard), shard=shard)
        return model, reader.dequantised
    return LlamaCpuModel(config, pack_model(library, spec, reader), precision.kv_dtype), reader.dequantised


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
        return _random_weights(config, precision_of(source, config).dtype, source.seed, device)
    checkpoint = Checkpoint(directory)
    prefix = without_prefix(checkpoint)
    names = frozenset(prefix + name for name in checkpoint)
    return Weights(
        with_merged_experts(names, lambda name: checkpoint.tensor(name.removeprefix(prefix), precision.dtype)),
        lambda name: checkpoint.integers(name.removeprefix(prefix)),
    )


def _random_weights(config: PretrainedConfig, dtype: torch.dtype, seed: int, device: torch.device) -> Weights:
    tensors = random_module(config, dtype, seed, device).state_dict()
    return Weights(with_merged_experts(tensors, tensors.__getitem__))
