"""Loads a decoder checkpoint in Hugging Face format, or makes one with random weights from its configuration."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import torch
from torch import nn
from torch.nn.functional import linear

from common.checkpoint.context import context_of
from common.checkpoint.hub import checkpoint_directory
from common.checkpoint.wrappers import SAME_FOR_TEXT, WRAPPERS, language_tensor
from common.contracts.errors import FieldViolation, InvalidConfig, Unsupported
from common.settings.options import LoadFormat
from gpuworker.checkpoints.progress import telling_progress
from gpuworker.checkpoints.stored_tensors import StoredTensors
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.devices import dtype_name, free_bytes
from gpuworker.models.hf.indexers import refuse_blocks_of_keys
from gpuworker.models.hf.mixer_kernels import without_foreign_kernels
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.precision import Precision, resolve_precision

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# How many tokens a call is laid out for; other numbers run as well, as fast as measured for 1 to 256.
_TOKENS: Final = 32
# A copy of a weight that an embedding keeps may take this much of the free memory at most.
_COPY_FRACTION: Final = 0.25
_PROBE_TOKENS: Final = 8
_MIB: Final = 1 << 20
_log = logging.getLogger(__name__)


# Linear layers of a transformers model on CPU: oneDNN's layout of the weights is made once, not at every call.
# The operations are private to torch (torch.compile uses them). Where they are missing, or do not take the type,
# the layers stay as they are. Only a plain nn.Linear is replaced, and only if no other module reads its weight; one
# run of the model shows that. The unpacked weight is freed, except where an embedding shares it.
class PrepackedLinear(nn.Module):
    """y = x · weightᵀ + bias, as nn.Linear computes it; it has no `weight` to read."""

    def __init__(self, plain: nn.Linear, packed: torch.Tensor | None = None) -> None:
        """`packed` is the weight where another layer has packed it."""
        super().__init__()
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        self._borrows = packed is not None
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _TOKENS)
        self.packed: torch.Tensor = packed

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight, which is neither parameter nor buffer; 0 where another layer has packed it."""
        return 0 if self._borrows else self.packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] for x [..., K]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


@dataclass(slots=True)
class Prepacking:
    """What was replaced: layers of how many, their bytes, and the bytes of those that an embedding keeps as well."""

    total: int = 0
    layers: int = 0
    packed_bytes: int = 0
    copied_bytes: int = 0

    def __str__(self) -> str:
        what = f"{self.layers} of {self.total} linear layers prepacked for oneDNN, {self.packed_bytes / _MIB:.0f} MiB"
        copied = f", {self.copied_bytes / _MIB:.0f} MiB of it beside embeddings that keep the same weight"
        return what + (copied if self.copied_bytes else "")


def prepack(model: TransformersModel) -> Prepacking:
    """Replace the replaceable linear layers of a model on CPU, and log the result."""
    done = Prepacking()
    if model.device.type != "cpu":
        return done
    if reason := why_not(model.dtype):
        _log.info("no prepacking in %s, linear layers run as torch has them: %s", dtype_name(model.dtype), reason)
        return done
    absorbed = {id(each.linear) for each in model.absorbed.layers}  # whose weights attention reads
    places = [place for place in _places(model.module) if id(place.layer) not in absorbed]
    done.total = len(places)
    able = _seen_alone(model, [place.layer for place in places])
    holders = Counter(id(weight) for each in model.module.modules() for weight in each._parameters.values())
    able_places = [place for place in places if id(place.layer) in able]
    weights = [id(place.layer.weight) for place in able_places]  # of several layers one may be the same (zamba2)
    shared, packed = Counter(weights), dict[int, torch.Tensor]()
    for place, weight in zip(able_places, weights, strict=True):
        _replace(place, holders[weight] > shared[weight], packed.get(weight), done)
        if isinstance(made := getattr(place.parent, place.name), PrepackedLinear):
            packed[weight] = made.packed
    _log.info("%s", done)
    return done


def why_not(dtype: torch.dtype) -> str:
    """Return why torch cannot prepack in this type here; "" when it can."""
    plain = nn.utils.skip_init(nn.Linear, 16, 16, bias=False, dtype=dtype)  # leaves every random generator alone
    numbers = torch.arange(-8, 8, dtype=dtype)
    try:
        with torch.inference_mode():
            plain.weight.copy_(numbers + numbers[:, None])
            same = torch.equal(PrepackedLinear(plain)(numbers[None]), plain(numbers[None]))
    except (AttributeError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "" if same else "its results are wrong"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a linear layer stands."""

    parent: nn.Module
    name: str
    layer: nn.Linear


def _places(module: nn.Module) -> list[_Place]:
    """Return the plain linear layers without hooks, except those that stand in several places."""
    found = [
        _Place(parent, name, layer)
        for parent in module.modules()
        for name, layer in parent._modules.items()
        if type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks
    ]
    times = Counter(id(place.layer) for place in found)
    return [place for place in found if times[id(place.layer)] == 1]


def _seen_alone(model: TransformersModel, layers: list[nn.Linear]) -> set[int]:
    """Return the ids of the layers that a forward of the model calls, and whose weight nothing else reads."""
    called: set[int] = set()
    read: set[int] = set()

    class Watched(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            if name == "weight":
                read.add(id(self))
            return super().__getattribute__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            called.add(id(self))
            return linear(x, cast("torch.Tensor", self._parameters["weight"]), self.bias)

    for layer in layers:
        layer.__class__ = Watched
    try:
        model.reference_logits(torch.arange(min(_PROBE_TOKENS, model.vocab_size))[None])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return set()  # the self-test reports the error
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
    return called - read


def _replace(place: _Place, copied: bool, packed: torch.Tensor | None, done: Prepacking) -> None:
    """Replace one layer and free its weight, unless the copy of a weight that stays would take too much memory."""
    nbytes = place.layer.weight.nbytes
    if packed is None and copied and nbytes > _COPY_FRACTION * free_bytes(place.layer.weight.device):
        _log.info("%s is not prepacked: beside the embedding %d MiB more are too much", place.name, nbytes // _MIB)
        return
    made = PrepackedLinear(place.layer, packed)
    setattr(place.parent, place.name, made)
    place.layer._parameters.clear()  # memory is freed layer by layer
    done.layers += 1
    done.packed_bytes += made.packed_bytes
    done.copied_bytes += made.packed_bytes if copied else 0


# Entries of a rope with three positions a token, which are equal for text.
_OF_POSITIONS: Final = ("mrope_section", "mrope_interleaved")
# What a language model does whatever its configuration says, and its plain kind where its configuration says so.
_ALWAYS: Final[Mapping[str, Mapping[str, Any]]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}


# The configuration of a language model that lies in a model of several media (common/checkpoint/wrappers.py).
def unwrapped(config: PretrainedConfig, directory: Path) -> PretrainedConfig:
    """Return the configuration of the language model of a wrapper; any other configuration as it is.

    The last linear is the embedding where the checkpoint has none: wrappers say it in one place or another.
    """
    if config.model_type not in WRAPPERS:
        return config
    text = config.get_text_config()
    plain = _plain(text, SAME_FOR_TEXT[text.model_type]) if text.model_type in SAME_FOR_TEXT else copy.deepcopy(text)
    plain.dtype = text.dtype or config.dtype
    plain.tie_word_embeddings = _is_tied(config, directory)
    return plain


def _plain(text: PretrainedConfig, kind: str) -> PretrainedConfig:
    """Return the configuration of a kind that computes the same for text."""
    from transformers import CONFIG_MAPPING

    made: Any = CONFIG_MAPPING[kind]
    entries = {each.name: getattr(text, each.name) for each in fields(made) if each.init and hasattr(text, each.name)}
    rope = {name: value for name, value in text.rope_parameters.items() if name not in _OF_POSITIONS}
    if "head_dim" not in entries or entries["head_dim"] is None:
        entries["head_dim"] = text.hidden_size // text.num_attention_heads
    rope.setdefault("partial_rotary_factor", 1.0)  # some plain kinds have another default
    found: PretrainedConfig = made(**{**entries, **_ALWAYS.get(text.model_type, {}), "rope_parameters": rope})
    return found


def _is_tied(config: PretrainedConfig, directory: Path) -> bool:
    try:
        names = list(StoredTensors(directory))
    except InvalidConfig:  # without weights: only random ones are wanted
        names = []
    plain = [found for name in names if (found := language_tensor(name)) is not None]
    return not any(name.startswith("lm_head.") for name in plain) if plain else bool(config.tie_word_embeddings)


LOAD_FORMATS = get_args(LoadFormat)
# Layers of attention, of a state, of both, and of neither.
_LAYER_KINDS = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    *("linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"),
}
_OF_CONTEXT = ("model_type", "max_position_embeddings", "original_max_position_embeddings", "rope_parameters")
_DEFAULT_LIMIT = 2048
_MOST_CHARACTERS = 300  # of an error of transformers
# What transformers raises for a configuration that its class accepts and its model does not, or that needs a package.
_RAISED = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    ValueError,
)


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
    # It advises packages: what runs in kernels, and which package adds some, is said below.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    model = TransformersModel(module, precision.kv_dtype)
    for words in () if model.states is None else model.states.kernels_in_words:
        _log.info("%s: %s", config.model_type, words)
    for correction in model.corrections:
        _log.warning("%s in transformers: %s", config.model_type, correction)
    if model.absorbed.layers:
        _log.info("%s attends on latents: V is a part of K, of one head", config.model_type)
    if model.absorbed.reason:
        _log.warning("%s: %s", config.model_type, model.absorbed.reason)
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
        what = f"{directory}/config.json is not a configuration that transformers can read: {why}; correct it"
        raise InvalidConfig(FieldViolation("--model", what)) from error


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise Unsupported for options whose effect a short self-test would not show.

    These are layers and rope scalings that depend on more than a token's position and the keys before it.
    """
    text = config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if unknown:
        kinds, known = ", ".join(sorted(unknown)), " and ".join(sorted(_LAYER_KINDS))
        raise Unsupported(f"{text.model_type} has layers of kind {kinds}; only {known} can be served")
    refuse_blocks_of_keys(text)
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
    return make_module(config, weights, dtype, device)


def make_module(
    config: PretrainedConfig, weights: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return a model with eager attention on the device from its weights, tensors or what gives them by index.

    Raises ValueError when one is missing or has another shape than the configuration says.
    """
    from transformers import AutoModelForCausalLM

    plain = _without_quantisation(config)
    with torch.device("meta"), without_foreign_kernels(device):
        kind = type(AutoModelForCausalLM.from_config(plain))
    options: dict[str, Any] = {"state_dict": dict(weights), "dtype": dtype, "attn_implementation": "eager"}
    module, report = kind.from_pretrained(None, config=plain, output_loading_info=True, **options)
    bad = sorted(str(name) for part in ("missing_keys", "mismatched_keys") for name in report[part])
    if bad:
        raise ValueError(f"{len(bad)} weights are missing or have another shape, such as {bad[0]}")
    return cast("PreTrainedModel", module.to(device))


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
    with torch.random.fork_rng(devices), device, without_foreign_kernels(device):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return cast("PreTrainedModel", module)
