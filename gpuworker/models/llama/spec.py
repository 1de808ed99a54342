"""The sizes and options of a model of the Llama family, read from its configuration for the native path.

Llama, Qwen2, Qwen3 and Mistral are one network with a few options. Mixtral, Qwen3-MoE and OLMoE have experts in place
of the MLP of all or some layers. In LFM2, Qwen3-Next and Qwen3.5 some layers keep a state in place of K and V: a short
convolution, or a gated delta rule. Layers of Gemma 4 differ in heads, some have no K and V of their own, and all norm
what they give. A configuration with any other option is refused, and its model runs on transformers: slower, but right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENTION, CONV, DELTA = "full_attention", "conv", "linear_attention"
SLIDING: Final = "sliding_attention"
_QWEN_HYBRIDS: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# The kinds of layers of families in which some keep a state.
_LFM2: Final = ("lfm2", "lfm2_moe")
_HYBRIDS: Final[Mapping[str, str]] = {**dict.fromkeys(_LFM2, CONV), **dict.fromkeys(_QWEN_HYBRIDS, DELTA)}
_GEMMA: Final = "gemma4_text"
FAMILY = ("llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen3", "qwen3_moe", *_HYBRIDS, _GEMMA)
_NO_WINDOW = ("llama", "olmoe")
_ONE_WINDOW = ("mistral", "mixtral", "qwen3_moe")  # the same in every layer
# Scalings whose angle depends on a token's position alone. "longrope" and "dynamic" look at the longest sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS = ("silu", "swish")
_MOST_TAPS: Final = 8  # of a convolution, kMostTaps of llama_states.h
# What the configurations of hybrids and of Gemma 4 declare: entries that are read here, or that no logit depends on. A
# version of transformers that declares more may compute more.
_DECLARED: Final = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "norm_eps", "layer_types"),
        *("tie_word_embeddings", "rope_parameters", "attention_bias", "conv_bias", "conv_L_cache", "full_attn_idxs"),
        *("block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        *("decoder_sparse_step", "mlp_only_layers", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "num_dense_layers", "use_expert_bias"),
        *("routed_scaling_factor", "hidden_activation", "sliding_window", "final_logit_softcapping"),
        *("use_bidirectional_attention", "vocab_size_per_layer_input", "hidden_size_per_layer_input"),
        *("attention_k_eq_v", "num_kv_shared_layers", "enable_moe_block", "use_double_wide_mlp", "top_k_experts"),
        *("initializer_range", "use_cache", "attention_dropout", "output_router_logits", "router_aux_loss_coef"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "base_config_key", "ignore_keys_at_rope_validation"),
    }
)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a model: each token goes through `top_k` of `count` MLPs, in the layers that `layers` marks.

    The weights of a token's experts are a softmax: over those experts where they are `normalised`, else over all.
    `family` says how a checkpoint names the tensors: "mixtral", "olmoe", "qwen3_moe", "lfm2_moe" or "gemma4".
    `shared_size` is that of the MLP that each token goes through besides, behind a gate, or in Gemma 4 without one; 0:
    there is none. With `sigmoid` weights are sigmoids times `factor`, and those of the chosen experts are divided by
    their sum where they are `normalised`; `biased` ones have a bias by which they are chosen and not weighed.
    """

    family: str
    count: int
    top_k: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]
    shared_size: int = 0
    sigmoid: bool = False
    biased: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The layers with a gated delta rule. Each key head serves `value_heads / key_heads` value heads.

    `interleaved`: the rows of their linears are in the order of key heads, and else q, k, v and so on.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    interleaved: bool

    @property
    def keys(self) -> int:
        """Numbers of a token's queries, or of its keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """What differs between layers of Gemma 4.

    A layer that `borrows` attends on the K and V of the last layer before it that slides as it does, and has its own;
    with `same_values` its values are its keys before norm and rope; `inner` is the width of its MLP.
    """

    slides: bool
    head_dim: int
    num_kv_heads: int
    borrows: bool
    same_values: bool
    inner: int


@dataclass(frozen=True, slots=True)
class GemmaSpec:
    """What Gemma 4 has beside the rest of the family: norms of what layers give, and of values; a scalar of each layer.

    `embedding_scale` multiplies embedded tokens; logits become `cap` * tanh(logit / cap), None: they stay. Each layer
    takes `input_size` numbers of a token besides, of so many rows as there are tokens; 0: it does not.
    """

    layers: tuple[GemmaLayer, ...]
    embedding_scale: float
    cap: float | None
    input_size: int
    input_layers: int
    input_vocab: int


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """A model of the family. Layers differ in experts, and in `windows`: the positions that a query sees, None for all.

    `scale` multiplies attention scores. `qkv_bias` and `o_bias` are of the attention's linears, `mlp_bias` of all three
    of the MLP; `qk_norm`: queries and keys are normed before rope, head by head, or where it is `joint` all heads of
    a token as one row; `clip` (None: no clipping) then bounds queries, keys and values; `tied`: the rows of the
    embedding are the weights of the last linear. `names` says how a checkpoint names its tensors: "llama", "lfm2" or
    "gemma4". Where `gemma` is there, it has the sizes in which layers differ.

    `kinds` are those of layers where some keep a state, ATTENTION, CONV or DELTA. Those of CONV convolve `taps` inputs
    of `conv_size` channels (0: `hidden_size`), and so do those of DELTA before their rule. `rotary_dim`: rope rotates
    so many numbers of a head (None: all); `gated`: what is attended is multiplied by the sigmoid of a gate; `centred`:
    weights of norms are stored less 1.
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
    names: str = "llama"
    kinds: tuple[str, ...] = ()
    taps: int = 0
    conv_bias: bool = False
    delta: DeltaSpec | None = None
    rotary_dim: int | None = None
    gated: bool = False
    centred: bool = False
    gemma: GemmaSpec | None = None
    conv_size: int = 0

    @property
    def conv_channels(self) -> int:
        """Channels of a short convolution."""
        return self.conv_size or self.hidden_size

    @property
    def query_norm_size(self) -> int:
        """Numbers in the weight of the norm of queries, where all layers are alike."""
        return self.num_heads * self.head_dim if self.joint_norm else self.head_dim

    @property
    def key_norm_size(self) -> int:
        return self.num_kv_heads * self.head_dim if self.joint_norm else self.head_dim

    def heads(self, layer: int) -> tuple[int, int]:
        """Return the size of a layer's heads, and how many have K and V."""
        if self.gemma is None:
            return self.head_dim, self.num_kv_heads
        own = self.gemma.layers[layer]
        return own.head_dim, own.num_kv_heads

    @property
    def sources(self) -> Mapping[int, int]:
        """The layers that attend on the K and V of another one, and which that is."""
        found, last = {}, dict[bool, int]()
        for layer, its in enumerate(() if self.gemma is None else self.gemma.layers):
            if its.borrows:
                found[layer] = last[its.slides]
            else:
                last[its.slides] = layer
        return found

    def kind(self, layer: int) -> str:
        """Return what mixes the tokens of a layer."""
        return self.kinds[layer] if self.kinds else ATTENTION

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that keep K and V."""
        borrowing = self.sources
        layers = (layer for layer in range(self.num_layers) if layer not in borrowing)
        return tuple(layer for layer in layers if self.kind(layer) == ATTENTION)

    @property
    def keeping(self) -> frozenset[int]:
        """The layers that keep a state."""
        return frozenset(layer for layer in range(self.num_layers) if self.kind(layer) != ATTENTION)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def only(self, layers: Sequence[int]) -> LlamaSpec:
        """Return the description of a model of some of the layers, in this order."""
        windows = tuple(self.windows[layer] for layer in layers)
        marks = tuple(self.has_experts(layer) for layer in layers)
        experts = None if self.experts is None else replace(self.experts, layers=marks)
        kinds = tuple(self.kinds[layer] for layer in layers) if self.kinds else ()
        gemma = self.gemma
        if gemma is not None:
            gemma = replace(gemma, layers=tuple(gemma.layers[layer] for layer in layers))
        return replace(self, num_layers=len(layers), windows=windows, experts=experts, kinds=kinds, gemma=gemma)


def why_not_llama(config: PretrainedConfig) -> str | None:
    """Return why the native path cannot run a model, in words; None when it can."""
    kind = config.model_type
    if kind not in FAMILY:
        return f"{kind} is not of the Llama family ({', '.join(FAMILY)})"
    if kind == _GEMMA:
        return _why_not_declared(config) or _why_not_gemma(config) or _why_not_borrowing(config)
    if differing := getattr(config, "per_layer_attributes", None):
        return f"its layers differ in {', '.join(sorted(differing))}"
    reason = _why_not_hybrid(config) if kind in _HYBRIDS else _why_not_layers(config)
    if reason is not None:
        return reason
    if (activation := getattr(config, "hidden_act", "silu")) not in _ACTIVATIONS:
        return f"its activation is {activation}, not silu"
    return _why_not_experts(_experts(config)) or _why_not_olmoe(config) or _why_not_rope(config)


def _why_not_experts(experts: ExpertsSpec | None) -> str | None:
    if experts is None or 0 < experts.top_k <= experts.count:
        return None
    return f"a token goes through {experts.top_k} of its {experts.count} experts"


def _why_not_layers(config: PretrainedConfig) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and config.model_type in _ONE_WINDOW:
        return f"a {config.model_type} that names the kinds of its layers"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    return None


def _why_not_hybrid(config: PretrainedConfig) -> str | None:
    """Return why the layers of a family with states cannot run natively."""
    kind, state = config.model_type, _HYBRIDS[config.model_type]
    if (reason := _why_not_declared(config)) is not None:
        return reason
    kinds = tuple(config.layer_types or ())
    if len(kinds) != config.num_hidden_layers or set(kinds) - {ATTENTION, state} or ATTENTION not in kinds:
        return f"its {config.num_hidden_layers} layers are of kinds {', '.join(sorted(set(kinds)))}"
    taps = config.conv_L_cache if kind in _LFM2 else config.linear_conv_kernel_dim
    if not 2 <= taps <= _MOST_TAPS:
        return f"it convolves {taps} tokens, not 2 to {_MOST_TAPS}"
    if kind in _LFM2:
        return None
    if config.linear_num_value_heads % config.linear_num_key_heads:
        return f"{config.linear_num_key_heads} key heads do not divide {config.linear_num_value_heads} value heads"
    return None


def _why_not_declared(config: PretrainedConfig) -> str | None:
    from transformers import PretrainedConfig as Base

    declared = type(config).__dataclass_fields__.keys() - Base.__dataclass_fields__.keys()
    unknown = sorted(declared - _DECLARED)
    return f"its configuration has {', '.join(unknown)}, which the native path does not know" if unknown else None


def _why_not_gemma(config: PretrainedConfig) -> str | None:
    """Return why a Gemma 4 cannot run natively."""
    if differing := set(getattr(config, "per_layer_attributes", None) or ()) - {"head_dim", "num_key_value_heads"}:
        return f"its layers differ in {', '.join(sorted(differing))}"
    if config.hidden_activation != "gelu_pytorch_tanh":
        return f"its activation is {config.hidden_activation}, not gelu_pytorch_tanh"
    if config.use_bidirectional_attention == "all":
        return "its tokens attend in both directions"
    kinds = set(config.layer_types)
    if len(config.layer_types) != config.num_hidden_layers or kinds - {ATTENTION, SLIDING}:
        return f"its {config.num_hidden_layers} layers are of kinds {', '.join(sorted(kinds))}"
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input < config.vocab_size:
        return f"its layers take inputs of {config.vocab_size_per_layer_input} tokens, and it has {config.vocab_size}"
    used = ((config.rope_parameters[kind] or {}).get("rope_type") for kind in sorted(kinds))
    others = [str(rope) for rope in used if rope not in (*_STATIC_ROPE, "proportional")]
    return f"its rotary embedding is of kind {others[0]}" if others else None


def _why_not_borrowing(config: PretrainedConfig) -> str | None:
    """Return why layers of a Gemma 4 cannot attend on the K and V of others, or a token go through its experts."""
    try:
        layers = _gemma_layers(config)
    except ValueError as error:
        return str(error)
    if (reason := _why_not_experts(_gemma_experts(config))) is not None:
        return reason
    own: dict[bool, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        heads = layer.head_dim, layer.num_kv_heads
        if layer.head_dim % 2 or config.num_attention_heads % layer.num_kv_heads:
            return f"layer {number} has {config.num_attention_heads} heads of {layer.head_dim}, {heads[1]} with K and V"
        if not layer.borrows:
            own[layer.slides] = heads
        elif own.get(layer.slides) != heads:
            return f"layer {number} attends on K and V of other heads than its own"
    return None


def llama_spec(config: PretrainedConfig) -> LlamaSpec | None:
    """Return the description of a model of the family; None when `why_not_llama` has a reason."""
    if why_not_llama(config) is not None:
        return None
    if config.model_type in _HYBRIDS:
        return _hybrid_spec(config)
    if config.model_type == _GEMMA:
        return _gemma_spec(config)
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


def _hybrid_spec(config: PretrainedConfig) -> LlamaSpec:
    layers, head_dim, is_lfm2 = config.num_hidden_layers, _head_dim(config), config.model_type in _LFM2
    bias = not is_lfm2 and config.attention_bias
    return LlamaSpec(
        num_layers=layers,
        hidden_size=config.hidden_size,
        intermediate_size=_inner_of_lfm2(config) if is_lfm2 else getattr(config, "intermediate_size", 0),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.norm_eps if is_lfm2 else config.rms_norm_eps,
        scale=head_dim**-0.5,
        windows=(None,) * layers,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        tied=config.tie_word_embeddings,
        experts=_experts(config),
        names="lfm2" if is_lfm2 else "llama",
        kinds=tuple(config.layer_types),
        taps=config.conv_L_cache if is_lfm2 else config.linear_conv_kernel_dim,
        conv_bias=is_lfm2 and config.conv_bias,
        delta=None if is_lfm2 else _delta(config),
        rotary_dim=_rotary_dim(config),
        gated=not is_lfm2,
        centred=not is_lfm2,
    )


def _inner_of_lfm2(config: PretrainedConfig) -> int:
    """Return the width of an MLP: two thirds of what is named, times a factor, rounded up to a multiple.

    With experts it is what is named.
    """
    size: int = config.intermediate_size
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple: int = config.block_multiple_of
    return -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple


def _delta(config: PretrainedConfig) -> DeltaSpec:
    return DeltaSpec(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        interleaved=config.model_type == "qwen3_next",
    )


def _gemma_spec(config: PretrainedConfig) -> LlamaSpec:
    layers, inputs = _gemma_layers(config), config.hidden_size_per_layer_input or 0
    gemma = GemmaSpec(
        layers=layers,
        embedding_scale=config.hidden_size**0.5,
        cap=config.final_logit_softcapping,
        input_size=inputs,
        input_layers=len(layers),
        input_vocab=config.vocab_size_per_layer_input,
    )
    return LlamaSpec(
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        scale=1.0,
        windows=tuple(config.sliding_window if layer.slides else None for layer in layers),
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=False,
        tied=config.tie_word_embeddings,
        experts=_gemma_experts(config),
        names="gemma4",
        gemma=gemma,
    )


def _gemma_experts(config: PretrainedConfig) -> ExpertsSpec | None:
    if not config.enable_moe_block:
        return None
    sizes = (config.num_experts, config.top_k_experts, config.moe_intermediate_size)
    return ExpertsSpec("gemma4", *sizes, True, (True,) * config.num_hidden_layers, config.intermediate_size)


def _gemma_layers(config: PretrainedConfig) -> tuple[GemmaLayer, ...]:
    """Return what differs between layers. Raises ValueError where layers borrow K and V that no layer has."""
    found = []
    for number, mode in enumerate(config.kv_sharing_modes):
        own, slides, borrows = config.per_layer_config[number], config.layer_types[number] == SLIDING, mode == "reuse"
        inner = config.intermediate_size * (2 if borrows and config.use_double_wide_mlp else 1)
        same = bool(config.attention_k_eq_v) and not slides
        found.append(GemmaLayer(slides, own.head_dim, own.num_key_value_heads, borrows, same, inner))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation of heads: float32 [length, 2, pairs], cosines and then sines, of numbers i and i + `apart`."""

    table: torch.Tensor
    apart: int


def ropes(config: PretrainedConfig, length: int) -> tuple[Rope, ...]:
    """Return the rotations of positions 0 .. length - 1 that a model's layers have; of Gemma 4 that of sliding layers
    comes first."""
    if config.model_type != _GEMMA:
        table = rope_table(config, length)
        return (Rope(table, table.shape[2]),)
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    with torch.device("cpu"), torch.inference_mode():
        made: type[Any] = Gemma4TextRotaryEmbedding
        embedding = made(config)
        return tuple(_gemma_rope(embedding, kind, length) for kind in (SLIDING, ATTENTION))


def _gemma_rope(embedding: Any, kind: str, length: int) -> Rope:
    """Return the rotation of a kind of layers, without the pairs at the end that no position turns."""
    if kind not in embedding.layer_types:
        return Rope(torch.zeros(length, 2, 1), 1)
    inverse: torch.Tensor = getattr(embedding, f"{kind}_inv_freq")
    scaling, turned = getattr(embedding, f"{kind}_attention_scaling"), inverse.nonzero()
    pairs = len(inverse) if scaling != 1.0 or not len(turned) else int(turned.max()) + 1
    angles = torch.arange(length)[:, None].float() * inverse[:pairs].float()
    return Rope(torch.stack((angles.cos() * scaling, angles.sin() * scaling), dim=1).clone(), len(inverse))


def rope_table(config: PretrainedConfig, length: int) -> torch.Tensor:
    """Return float32 [length, 2, rotary_dim / 2]: cosines, then sines, of positions 0 .. length - 1.

    Where rope is scaled, transformers' own module makes it, attention factors included. The rotation takes element i of
    a head with element i + rotary_dim / 2.
    """
    with torch.device("cpu"), torch.inference_mode():
        positions = torch.arange(length)
        if config.rope_parameters["rope_type"] == "default":
            base, dim = config.rope_parameters["rope_theta"], _rotary_dim(config)
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
    if config.model_type in _QWEN_HYBRIDS:
        dim = _rotary_dim(config)
        return None if 0 < dim <= _head_dim(config) and dim % 2 == 0 else f"it rotates {dim} numbers of each head"
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return None if partial in (None, 1.0) else f"it rotates only {partial} of each head"


def _rotary_dim(config: PretrainedConfig) -> int:
    """Return how many numbers of a head rope rotates."""
    partial = config.rope_parameters.get("partial_rotary_factor", 1.0) if config.model_type in _QWEN_HYBRIDS else 1.0
    return int(_head_dim(config) * partial)


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
    if kind == "qwen3_5_moe_text":
        sizes = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        return ExpertsSpec("qwen3_moe", *sizes, True, (True,) * count, config.shared_expert_intermediate_size)
    if kind == "lfm2_moe":
        sizes = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        layers = tuple(layer >= config.num_dense_layers for layer in range(count))
        options = {"sigmoid": True, "biased": config.use_expert_bias, "factor": config.routed_scaling_factor}
        return ExpertsSpec(kind, *sizes, config.norm_topk_prob, layers, **options) if any(layers) else None
    if kind not in ("qwen3_moe", "qwen3_next"):
        return None
    step, without = config.decoder_sparse_step, config.mlp_only_layers
    layers = tuple(
        config.num_experts > 0 and layer not in without and (layer + 1) % step == 0 for layer in range(count)
    )
    sizes = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    shared = config.shared_expert_intermediate_size if kind == "qwen3_next" else 0
    return ExpertsSpec("qwen3_moe", *sizes, config.norm_topk_prob, layers, shared) if any(layers) else None
