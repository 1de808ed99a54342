"""The sizes and options of a model of the Llama family, read from its configuration for the native path.

Llama, Qwen2, Qwen3 and Mistral are one network with a few options. A configuration with any other option is refused,
and its model runs on transformers: slower, but right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
# Scalings whose angle depends on a token's position alone. "longrope" and "dynamic" look at the longest sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """A model of the family. Every layer is alike but for `windows`: the positions that a query sees, None for all.

    `scale` multiplies attention scores. `qkv_bias` and `o_bias` are of the attention's linears, `mlp_bias` of all three
    of the MLP; `qk_norm`: queries and keys are normed, head by head, before rope; `tied`: the rows of the
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


def why_not_llama(config: PretrainedConfig) -> str | None:
    """Return why the native path cannot run a model, in words; None when it can."""
    kind = config.model_type
    if kind not in FAMILY:
        return f"{kind} is not of the Llama family ({', '.join(FAMILY)})"
    if config.hidden_act not in _ACTIVATIONS:
        return f"its activation is {config.hidden_act}, not silu"
    if kind == "mistral" and getattr(config, "layer_types", None):
        return "a mistral that names the kinds of its layers"
    if (kinds := set(getattr(config, "layer_types", None) or ())) - {"full_attention", "sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    return _why_not_rope(config)


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
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2" or (kind != "mistral" and bias),
        o_bias=kind in ("llama", "qwen3") and bias,
        mlp_bias=kind == "llama" and config.mlp_bias,
        tied=config.tie_word_embeddings,
    )


def rope_table(config: PretrainedConfig, length: int) -> torch.Tensor:
    """Return float32 [length, 2, head_dim / 2]: cosines, then sines, of positions 0 .. length - 1.

    transformers' own module makes it, so that every static scaling is right, attention factors included. The rotation
    takes element i of a head with element i + head_dim / 2.
    """
    positions = torch.arange(length)[None]
    embedding: type[Any] = LlamaRotaryEmbedding  # reads only options that all of the family have
    with torch.device("cpu"), torch.inference_mode():
        cos, sin = embedding(config)(torch.empty(0, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return torch.stack((cos[0, :, :half], sin[0, :, :half]), dim=1).contiguous().clone()


def _why_not_rope(config: PretrainedConfig) -> str | None:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if (kind := parameters.get("rope_type")) not in _STATIC_ROPE:
        return f"its rotary embedding is of kind {kind}"
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return None if partial in (None, 1.0) else f"it rotates only {partial} of each head"


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's window: Llama has none, Mistral the same everywhere, the others by the kind of layer."""
    count: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type == "llama":
        return (None,) * count
    if config.model_type == "mistral":
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
