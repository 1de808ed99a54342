"""The sizes and options of a model of the Llama family, read from its configuration for the native path.

Llama, Qwen2, Qwen3 and Mistral are one network with a few options. Mixtral, Qwen3-MoE and OLMoE have experts in place
of the MLP of all or some layers. A configuration with any other option is refused, and its model runs on transformers:
slower, but right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILY = ("llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen3", "qwen3_moe")
_NO_WINDOW = ("llama", "olmoe")
_ONE_WINDOW = ("mistral", "mixtral", "qwen3_moe")  # the same in every layer
# Scalings whose angle depends on a token's position alone. "longrope" and "dynamic" look at the longest sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a model: each token goes through `top_k` of `count` MLPs, in the layers that `layers` marks.

    The weights of a token's experts are a softmax: over those experts where they are `normalised`, else over all.
    `family` says how a checkpoint names the tensors: "mixtral", "olmoe" or "qwen3_moe".
    """

    family: str
    count: int
    top_k: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """A model of the family. Layers differ in experts, and in `windows`: the positions that a query sees, None for all.

    `scale` multiplies attention scores. `qkv_bias` and `o_bias` are of the attention's linears, `mlp_bias` of all three
    of the MLP; `qk_norm`: queries and keys are normed before rope, head by head, or where it is `joint` all heads of
    a token as one row; `clip` (None: no clipping) then bounds queries, keys and values; `tied`: the rows of the
    embedding are the weights of the last linear.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    scale: float
    windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    experts: ExpertsSpec | None = None
    joint_norm: bool = False
    clip: float | None = None

    @property
    def query_norm_size(self) -> int:
        """Numbers in the weight of the norm of queries."""
        return self.num_heads * self.head_dim if self.joint_norm else self.head_dim

    @property
    def key_norm_size(self) -> int:
        return self.num_kv_heads * self.head_dim if self.joint_norm else self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def only(self, layers: Sequence[int]) -> LlamaSpec:
        """Return the description of a model of some of the layers, in this order."""
        windows = tuple(self.windows[layer] for layer in layers)
        marks = tuple(self.has_experts(layer) for layer in layers)
        experts = None if self.experts is None else replace(self.experts, layers=marks)
        return replace(self, num_layers=len(layers), windows=windows, experts=experts)


def why_not_llama(config: PretrainedConfig) -> str | None:
    """Return why the native path cannot run a model, in words; None when it can."""
    kind = config.model_type
    if kind not in FAMILY:
        return f"{kind} is not of the Llama family ({', '.join(FAMILY)})"
    if (reason := _why_not_layers(config)) is not None:
        return reason
    if config.hidden_act not in _ACTIVATIONS:
        return f"its activation is {config.hidden_act}, not silu"
    if (experts := _experts(config)) is not None and not 0 < experts.top_k <= experts.count:
        return f"a token goes through {experts.top_k} of its {experts.count} experts"
    return _why_not_olmoe(config) or _why_not_rope(config)


def _why_not_layers(config: PretrainedConfig) -> str | None:
    if differing := getattr(config, "per_layer_attributes", None):
        return f"its layers differ in {', '.join(sorted(differing))}"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and config.model_type in _ONE_WINDOW:
        return f"a {config.model_type} that names the kinds of its layers"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    return None


def llama_spec(config: PretrainedConfig) -> LlamaSpec | None:
    """Return the description of a model of the family; None when `why_not_llama` has a reason."""
    if why_not_llama(config) is not None:
        return None
    kind, bias = config.model_type, bool(getattr(config, "attention_bias", False))
    head_dim = _head_dim(config)
    return LlamaSpec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        scale=head_dim**-0.5,
        windows=_windows(config),
        qk_norm=kind in ("olmoe", "qwen3", "qwen3_moe"),
        qkv_bias=kind == "qwen2" or (kind not in ("mistral", "mixtral") and bias),
        o_bias=kind in ("llama", "olmoe", "qwen3", "qwen3_moe") and bias,
        mlp_bias=kind == "llama" and config.mlp_bias,
        tied=config.tie_word_embeddings,
        experts=_experts(config),
        joint_norm=kind == "olmoe",
        clip=getattr(config, "clip_qkv", None) if kind == "olmoe" else None,
    )


def rope_table(config: PretrainedConfig, length: int) -> torch.Tensor:
    """Return float32 [length, 2, head_dim / 2]: cosines, then sines, of positions 0 .. length - 1.

    Where rope is scaled, transformers' own module makes it, attention factors included. The rotation takes element i of
    a head with element i + head_dim / 2.
    """
    with torch.device("cpu"), torch.inference_mode():
        positions = torch.arange(length)
        if config.rope_parameters["rope_type"] == "default":
            base, dim = config.rope_parameters["rope_theta"], _head_dim(config)
            inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
            angles = positions[:, None].float() * inverse
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = _scaled_rope(config, positions)
        return torch.stack((cos, sin), dim=1).contiguous().clone()


def _scaled_rope(config: PretrainedConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [length, head_dim / 2] each."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding: type[Any] = LlamaRotaryEmbedding  # reads only options that all of the family have
    cos, sin = embedding(config)(torch.empty(0, dtype=torch.float32), positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def _why_not_olmoe(config: PretrainedConfig) -> str | None:
    if config.model_type != "olmoe":
        return None
    if getattr(config, "sliding_window", None) is not None:
        return "an olmoe with a window"
    clip = config.clip_qkv
    return None if clip is None or clip > 0 else f"it clips queries, keys and values at {clip}"


def _why_not_rope(config: PretrainedConfig) -> str | None:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if (kind := parameters.get("rope_type")) not in _STATIC_ROPE:
        return f"its rotary embedding is of kind {kind}"
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return None if partial in (None, 1.0) else f"it rotates only {partial} of each head"


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's window: none in _NO_WINDOW, everywhere the same in _ONE_WINDOW, else by the kind of layer."""
    count: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type in _NO_WINDOW:
        return (None,) * count
    if config.model_type in _ONE_WINDOW:
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _experts(config: PretrainedConfig) -> ExpertsSpec | None:
    """Return the experts of a configuration. Mixtral's noise on the router's input is for training, and so left out."""
    kind, count = config.model_type, config.num_hidden_layers
    if kind == "mixtral":
        chosen, everywhere = config.num_experts_per_tok, (True,) * count
        return ExpertsSpec(kind, config.num_local_experts, chosen, config.intermediate_size, True, everywhere)
    if kind == "olmoe":
        sizes = (config.num_experts, config.num_experts_per_tok, config.intermediate_size)
        return ExpertsSpec(kind, *sizes, config.norm_topk_prob, (True,) * count)
    if kind != "qwen3_moe":
        return None
    step, without = config.decoder_sparse_step, config.mlp_only_layers
    layers = tuple(
        config.num_experts > 0 and layer not in without and (layer + 1) % step == 0 for layer in range(count)
    )
    sizes = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    return ExpertsSpec(kind, *sizes, config.norm_topk_prob, layers) if any(layers) else None
