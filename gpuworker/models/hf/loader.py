"""Loads a decoder checkpoint in Hugging Face format, or makes one with random weights from its configuration."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from common.checkpoint.context import context_of
from common.checkpoint.hub import checkpoint_directory
from common.contracts.errors import FieldViolation, InvalidConfig, Unsupported
from common.settings.options import LoadFormat
from gpuworker.checkpoints.progress import telling_progress
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.devices import dtype_name
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.precision import Precision, resolve_precision
from gpuworker.models.hf.prepacked import prepack
from gpuworker.models.hf.wrapped import unwrapped

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LOAD_FORMATS = get_args(LoadFormat)
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_OF_CONTEXT = ("model_type", "max_position_embeddings", "original_max_position_embeddings", "rope_parameters")
_DEFAULT_LIMIT = 2048
_MOST_CHARACTERS = 300  # of an error of transformers
# What transformers raises for a configuration that its class accepts and its model does not, or that needs a package.
_RAISED = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    ValueError,
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The origin of a model, a directory or a hub name, and the options of its load.

    `load_format` "auto" reads the weights, "dummy" makes random ones from `seed`. The other fields are names of
    options, as in `gpuworker.models.hf.precision`.
    """

    model: str
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    pooled: bool = False
    """Only hidden states are wanted: the head counts for nothing, and the checkpoint may lack it."""

    def config(self, directory: Path) -> PretrainedConfig:
        """Return the configuration of the checkpoint. A head that is not wanted shares the embedding's weights.

        Raises as `read_config` does.
        """
        config = read_config(directory)
        if self.pooled:
            for part in (config, config.get_text_config()):
                part.tie_word_embeddings = True
        return config


def load_model(source: ModelSource, device: torch.device) -> TransformersModel:
    """Return the model on the device, ready for its self-test.

    Raises InvalidConfig when the checkpoint cannot be read, Unsupported when its kind cannot run on a paged cache.
    """
    directory = checkpoint_directory(source.model)
    config = source.config(directory)
    refuse_unsupported(config)
    precision = precision_of(source, config)
    if source.load_format not in LOAD_FORMATS:
        what = f"{source.load_format!r}; expected one of {', '.join(LOAD_FORMATS)}"
        raise InvalidConfig(FieldViolation("--load-format", what))
    _refuse_quantization(precision, config)
    if precision.dtype == torch.float16 and device.type == "cpu":
        what = "%s runs on transformers in float16, which is slow on a CPU; --dtype bfloat16 or float32 is faster"
        _log.warning(what, config.model_type)
    try:
        with telling_progress(directory):
            if source.load_format == "dummy":
                module = random_module(config, precision.dtype, source.seed, device)
            else:
                module = _stored_model(directory, config, precision.dtype, device)
    except _RAISED as error:
        raise InvalidConfig(FieldViolation("--model", f"cannot load {directory}: {error}")) from error
    model = TransformersModel(module, precision.kv_dtype)
    prepack(model)
    return model


def precision_of(source: ModelSource, config: PretrainedConfig) -> Precision:
    """Return the precision that a source asks for. Raises InvalidConfig for an unknown name."""
    of_checkpoint = config.dtype if isinstance(config.dtype, torch.dtype) else None
    return resolve_precision(source.dtype, source.kv_cache_dtype, source.quantization, of_checkpoint)


def _refuse_quantization(precision: Precision, config: PretrainedConfig) -> None:
    """Raise InvalidConfig when linears are to be quantised: a transformers model's are torch's own."""
    if precision.quantization == "auto":
        _log.info(
            "%s runs on transformers: its linear layers stay in %s", config.model_type, dtype_name(precision.dtype)
        )
    elif precision.quantization != "none":
        what = (
            f"{precision.quantization} was asked for, and {config.model_type} runs on transformers, in the type of its"
            " linear layers; only models on the native CPU path are quantised at start. Use none or auto"
        )
        raise InvalidConfig(FieldViolation("--quantization", what))


def read_config(directory: Path) -> PretrainedConfig:
    """Return the configuration of a checkpoint, or of the language model that is served of it.

    Raises InvalidConfig when there is none, or of an unknown kind.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        what = f"no config.json in {directory}; expected a checkpoint in Hugging Face format"
        raise InvalidConfig(FieldViolation("--model", what))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory)
        if isinstance(config.get_text_config(), dict):
            raise ValueError(f"it has a text_config, and {config.model_type} is a text model itself")
        return unwrapped(config, directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        why = " ".join(f"{error}".split())[:_MOST_CHARACTERS]
        what = f"{directory}/config.json is no configuration that transformers reads: {why}; correct it"
        raise InvalidConfig(FieldViolation("--model", what)) from error


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise Unsupported for options whose effect a short self-test would not show.

    These are layers and rope scalings that depend on more than a token's position and the keys before it.
    """
    text = config.get_text_config()
    if differing := getattr(text, "per_layer_attributes", None):
        what = f"{text.model_type} has layers that differ in {', '.join(sorted(differing))}"
        raise Unsupported(f"{what}; only layers of one shape can be served")
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if unknown:
        kinds, known = ", ".join(sorted(unknown)), " and ".join(sorted(_LAYER_KINDS))
        raise Unsupported(f"{text.model_type} has layers of kind {kinds}; only {known} can be served")
    if getattr(text, "is_encoder_decoder", False):
        raise Unsupported(f"{text.model_type} is an encoder-decoder; only decoders can be served")
    if any(part.get("rope_type") == "dynamic" for part in _rope_parameters(text)):
        raise Unsupported(f"{text.model_type} scales its rotary embedding by the longest sequence of a batch (dynamic)")


def context_limit(config: PretrainedConfig) -> int:
    """Return how many positions the model can run, as `common/checkpoint/context.py` has it; 2048 if none is named."""
    text = config.get_text_config()
    return context_of({name: getattr(text, name, None) for name in _OF_CONTEXT}) or _DEFAULT_LIMIT


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of each kind of rope; none without any."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def _stored_model(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return the model of a checkpoint. transformers names, merges and converts what `Checkpoint` hands out.

    What is stored in the right type stays on the pages of its file; what is not is converted tensor by tensor.
    """
    checkpoint = Checkpoint(directory)
    if checkpoint.packed:
        what = f"{checkpoint.packed} of {len(list(checkpoint))} weights of the checkpoint are in {checkpoint.format}"
        _log.info("%s; the transformers path runs them dequantised, in %s", what, dtype_name(dtype))
    weights = {name: _Unread(checkpoint, name, dtype) for name in checkpoint}
    module: torch.nn.Module = make_module(config, weights, dtype)
    return cast("PreTrainedModel", module.to(device))


def make_module(config: PretrainedConfig, weights: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with eager attention from its weights, tensors or what gives them when it is indexed.

    Raises ValueError when one is missing or has another shape than the configuration says.
    """
    from transformers import AutoModelForCausalLM

    plain = _without_quantisation(config)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(plain))
    options: dict[str, Any] = {"state_dict": dict(weights), "dtype": dtype, "attn_implementation": "eager"}
    module, report = kind.from_pretrained(None, config=plain, output_loading_info=True, **options)
    bad = sorted(str(name) for part in ("missing_keys", "mismatched_keys") for name in report[part])
    if bad:
        raise ValueError(f"{len(bad)} weights are missing or have another shape, such as {bad[0]}")
    return cast("PreTrainedModel", module)


@dataclass(frozen=True, slots=True)
class _Unread:
    """A weight that is read when transformers indexes it, which happens once."""

    checkpoint: Checkpoint
    name: str
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.checkpoint.tensor(self.name, self.dtype)[index]


def _without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy without the quantisation entry, for which transformers would require the library that wrote it."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            part.__dict__.pop(name, None)
    return plain


def random_module(config: PretrainedConfig, dtype: torch.dtype, seed: int, device: torch.device) -> PreTrainedModel:
    """Return a model with random weights from a seed, as transformers initialises them."""
    from transformers import AutoModelForCausalLM

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return cast("PreTrainedModel", module)
