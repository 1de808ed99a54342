"""The families of the matrix: every causal language model of the installed transformers, as tiny configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpuworker.models.hf.tiny import tiny_config

WINDOW: Final = 8
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the matrix: a family, and what its configuration says besides its defaults."""

    family: str
    note: str = ""
    options: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family}, {self.note}" if self.note else self.family

    def whole(self) -> PretrainedConfig:
        """Return the configuration in its default sizes. Raises what transformers raises."""
        made: PretrainedConfig = CONFIG_MAPPING[self.family](**_FIRST.get(self.family, {}))
        return made

    def config(self) -> PretrainedConfig:
        """Return the tiny configuration. Raises what transformers raises when its sizes do not fit each other."""
        return tiny_config(self.whole(), **(_SECOND.get(self.family, {}) | self.options))


# Options without which a family's default configuration cannot be built, is not a decoder, or lacks kinds of layers
# that published checkpoints have.
_FIRST: Final[Mapping[str, Options]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 4}
    | {"num_hidden_layers": 40},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
_MAMBA: Final = {"mamba_n_heads": 8, "mamba_d_head": 16}
# Layers that share the weights of their attention, by turns.
_SHARED: Final = {
    "num_hidden_layers": 7,
    "layers_block_type": [*("linear_attention", "hybrid") * 3, "linear_attention"],
}
# Sizes that the general rules get wrong.
_SECOND: Final[Mapping[str, Options]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba": _SHARED | {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": _SHARED | {"num_mem_blocks": 2, "use_mem_rope": True},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3": {"mm_tokens_per_image": 16},
}

_STATIC: Final = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
_LLAMA3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_STATIC}
_LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 24,
}
# Options that change what is attended, beside the window that every family with one gets.
_VARIANTS: Final[Mapping[str, Mapping[str, Options]]] = {
    "llama": {
        "rope llama3": {"rope_parameters": _LLAMA3},
        "rope yarn": {"rope_parameters": {"rope_type": "yarn", **_STATIC}},
        "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "rope dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        "biases": {"attention_bias": True, "mlp_bias": True},
    },
    "phi3": {"rope longrope": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 24}},
    "llama4_text": {"no chunks": {"layer_types": ["full_attention"] * 3}},
}


def entries() -> list[Entry]:
    """Return all rows: each family, the same with a window where it has none by default, and the variants."""
    return [entry for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for entry in _entries(family)]


def _entries(family: str) -> list[Entry]:
    found, fields = [Entry(family)], CONFIG_MAPPING[family].__dataclass_fields__
    if "is_decoder" in fields and not fields["is_decoder"].default:
        found.append(Entry(family, "is_decoder", {"is_decoder": True}))
    if _may_slide(family):
        found.append(Entry(family, "window", {"sliding_window": WINDOW} | _window_options(family)))
    return found + [Entry(family, note, options) for note, options in _VARIANTS.get(family, {}).items()]


def _may_slide(family: str) -> bool:
    """Return whether a family has a window that its default configuration leaves out."""
    fields = CONFIG_MAPPING[family].__dataclass_fields__
    if "sliding_window" not in fields:
        return False
    return fields["sliding_window"].default is None or "use_sliding_window" in fields


def _window_options(family: str) -> Options:
    fields = CONFIG_MAPPING[family].__dataclass_fields__
    switch = {"use_sliding_window": True} if "use_sliding_window" in fields else {}
    first = {"max_window_layers": 1} if "max_window_layers" in fields else {}
    return switch | first | ({"layer_types": None} if switch and "layer_types" in fields else {})
