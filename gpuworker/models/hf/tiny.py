"""A tiny configuration of the same kind as a given one: same code and options, other sizes and thresholds.

What a model computes beyond a window, or beyond any other threshold of its configuration, does not depend on its sizes.
So a tiny model with random weights shows in a moment what a prompt beyond 4,096 positions would show in minutes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Positions at which attention, rope or scores change. Each has another value here, so that none hides another.
THRESHOLDS: Final[dict[str, int]] = {
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
    "keep_window_size": 8,
    "local_attention": 16,
    "attention_chunk_size": 12,
    "floor_scale": 10,
    "log_scaling_n_floor": 10,
    "index_topk": 9,
    "indexer_budget": 9,
    "original_max_position_embeddings": 24,
}
POSITIONS: Final = 128
VOCAB_SIZE: Final = 160
_LAYERS: Final = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers encoder_layers num_encoder_layers"
    " depth"
).split()
_HEADS: Final = "num_attention_heads n_head n_heads num_heads swa_num_attention_heads".split()
_KV_HEADS: Final = "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads".split()
# The largest value of fields, by what families call them. Indexers have 16 heads: with few of them many keys score 0 in
# all, and which of equal keys is chosen depends on how many there are.
_LARGEST: Final[Mapping[int, str]] = {
    POSITIONS: """max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length
        max_target_positions""",
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: """hidden_size d_model n_embd embed_dim emb_dim dim embedding_size word_embed_proj_dim dim_model
        input_embedding_size output_embedding_size lru_width hidden_size_global adapter_in_dim
        adapter_out_dim adapter_input_size""",
    96: """intermediate_size ffn_dim n_inner d_ff dim_ff dff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size mlp_dim
        intermediate_size_mlp feed_forward_size dense_intermediate_size shared_intermediate_size
        prefix_dense_intermediate_size""",
    32: """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size moe_latent_size image_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size router_hidden_size""",
    24: "q_lora_rank",
    16: """head_dim global_head_dim v_head_dim qk_nope_head_dim kv_lora_rank swa_head_dim d_kv kv_channels d_head
        dim_head attention_head_dim attention_head_size index_head_dim indexer_head_dim linear_key_head_dim
        linear_head_dim linear_value_head_dim hidden_size_per_layer_input mamba_d_state ssm_state_size state_size
        mamba_d_head mamba_head_dim query_pre_attn_scalar o_lora_rank index_n_heads""",
    8: "qk_rope_head_dim rotary_dim laurel_rank mamba_dt_rank patch_size chunk_size",
    4: """num_experts num_local_experts n_routed_experts moe_num_experts indexer_n_heads linear_num_heads
        linear_num_value_heads encoder_attention_heads decoder_attention_heads num_encoder_attention_heads
        num_decoder_attention_heads attention_heads""",
    2: """attn_layer_period num_experts_per_tok moe_topk moe_top_k top_k_experts moe_k n_group linear_num_key_heads
        indexer_kv_heads""",
    1: "attn_layer_offset n_shared_experts topk_group first_k_dense_replace num_shared_experts num_dense_layers",
}
# Ends of the names of lists that have the numbers of some layers.
_NUMBERS_OF_LAYERS: Final = ("_layer_indices", "_attn_idxs")
_SIZES: Final = {name: size for size, names in _LARGEST.items() for name in names.split()}
# What models read although their class does not declare it.
_UNDECLARED: Final = ("rope_theta",)
# Large enough that a key more or less shows in every logit; models' own weights begin at 0.02.
_DEVIATION: Final = 0.3
_DEVIATIONS: Final = ("initializer_range", "init_std")


def thresholds(config: PretrainedConfig, limit: int) -> dict[str, int]:
    """Return the thresholds that a configuration names, by name, and that sequences of `limit` tokens pass."""
    text = config.get_text_config()
    named: dict[str, Any] = {name: getattr(text, name, None) for name in THRESHOLDS}
    for part in _rope_parts(getattr(text, "rope_parameters", None)):
        named["original_max_position_embeddings"] = part.get("original_max_position_embeddings")
    return {name: value for name, value in named.items() if _is_count(value) and value < limit}


def tiny_config(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """Return a configuration of the same class with small sizes, some layers of each kind, and small thresholds.

    `changes` are fields that get another value. Raises what the class raises for sizes that do not fit each other.
    """
    config = _readable(config)
    kept, shared = _kept_layers(config)
    values = {each.name: getattr(config, each.name, None) for each in fields(config) if each.init}
    for name, value in list(values.items()):
        values[name] = _tiny(config, name, value, kept)
    if shared:
        values["num_kv_shared_layers"] = shared
    if _differing(config):
        values["per_layer_config"] = {place: _tiny_overrides(config, layer) for place, layer in enumerate(kept)}
    values |= {name: value for name, value in vars(config).items() if name in _UNDECLARED and name not in values}
    return type(config)(**(_with_small_ids(values) | changes))


def _readable(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration whose fields may be read although layers have others: those of the layers come beside."""
    if not _differing(config):
        return config
    copied: Any = copy.deepcopy(config)
    copied.allow_global_per_layer_attribute_access = True
    return cast("PretrainedConfig", copied)


def _differing(config: PretrainedConfig) -> list[str]:
    """Return the names of fields of which some layers have another value."""
    return sorted(getattr(config, "per_layer_attributes", None) or ())


def _overrides(config: PretrainedConfig, layer: int) -> dict[str, Any]:
    """Return the fields of a layer that differ from those of the whole."""
    if not (names := _differing(config)):
        return {}
    own: Any = config.per_layer_config[layer]
    found = {name: getattr(own, name) for name in names}
    return {name: value for name, value in found.items() if value != getattr(config, name)}


def _tiny_overrides(config: PretrainedConfig, layer: int) -> dict[str, Any]:
    """Return them for the tiny configuration: twice or half of what other layers have there, so that they differ."""
    found = _overrides(config, layer)
    for name, value in found.items():
        whole = getattr(config, name)
        if _is_count(value) and _is_count(whole):
            tiny = _tiny_count(config, name, whole, range(_num_layers(config)))
            found[name] = 2 * tiny if value > whole else max(1, tiny // 2)
    if found:
        own, parts = cast("Any", config).per_layer_config[layer], ("qk_nope_head_dim", "qk_rope_head_dim")
        if getattr(own, "head_dim", None) == sum(int(getattr(own, part, None) or 0) for part in parts):
            found["head_dim"] = sum(found.get(part, _SIZES[part]) for part in parts)
    return found


def _tiny(config: PretrainedConfig, name: str, value: Any, kept: Sequence[int]) -> Any:
    """Return the value of a field in the tiny configuration."""
    if hasattr(value, "get_text_config"):  # the configuration of a part
        return tiny_config(value)
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _tiny_rope(value, _rotated(config))
    if isinstance(value, list | tuple) and name.endswith(_NUMBERS_OF_LAYERS):
        return type(value)(place for place, layer in enumerate(kept) if layer in value)
    if isinstance(value, list | tuple):
        return _of_layers(name, value, kept, _num_layers(config))
    if name in _DEVIATIONS:
        return _DEVIATION
    return _tiny_count(config, name, value, kept) if _is_count(value) else copy.deepcopy(value)


def _tiny_count(config: PretrainedConfig, name: str, value: int, kept: Sequence[int]) -> int:
    if name in _LAYERS:
        return min(value, len(kept))
    if name in _HEADS:
        return min(value, 4)
    if name in _KV_HEADS:
        return _tiny_kv_heads(config, value)
    if name in ("head_dim", "qk_head_dim"):
        return _tiny_head_dim(config, value)
    return min(value, (THRESHOLDS | _SIZES).get(name, value))


def _tiny_kv_heads(config: PretrainedConfig, value: int) -> int:
    """Return as many heads as queries have where a model has that, one where it has one, else two."""
    heads = next((found for name in _HEADS if (found := getattr(config, name, None))), value)
    return min(value, 4 if value == heads else 2)


def _tiny_head_dim(config: PretrainedConfig, value: int) -> int:
    """Return the size of a head. Where rope has a part of its own, the field may name that part, or the whole."""
    rope, rest = (int(getattr(config, name, None) or 0) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    tiny_rope, tiny_rest = min(rope, _SIZES["qk_rope_head_dim"]), min(rest, _SIZES["qk_nope_head_dim"])
    if rope and value in (rope, rope + rest):
        return tiny_rope if value == rope else tiny_rope + tiny_rest
    return min(value, _SIZES["head_dim"])


def _of_layers(name: str, value: list[Any] | tuple[Any, ...], kept: Sequence[int], layers: int) -> Any:
    """Return a list that has an entry for each layer with the entries of kept layers; other lists stay, made small."""
    if _are_layers(value, layers):
        return type(value)(range(len(kept)))
    chosen = [value[layer] for layer in kept] if layers and len(value) == layers else value
    if name in _SIZES:
        chosen = [min(each, _SIZES[name]) if _is_count(each) else each for each in chosen]
    return type(value)(chosen)


def _kept_layers(config: PretrainedConfig) -> tuple[list[int], int]:
    """Return the layers to keep, and how many of them share the K/V of earlier ones.

    The first two and the first of each kind are kept. A kind is what all lists with an entry for each layer say of it.
    """
    layers = _num_layers(config)
    named: list[Any] = [
        getattr(config, name, None) for name in ("layer_types", *(each.name for each in fields(config)))
    ]
    lists = [found for found in named if _is_list_of(found, layers)]
    kinds = [str([*(each[layer] for each in lists), _overrides(config, layer)]) for layer in range(layers)]
    kept = sorted({*range(min(2, layers)), *(kinds.index(kind) for kind in kinds)})[:6]
    if _is_count(getattr(config, "num_kv_shared_layers", None)):
        return kept * 2, len(kept)
    return kept, 0


def _is_list_of(value: Any, layers: int) -> bool:
    """Return whether a value has an entry for each layer, which says something of it."""
    return isinstance(value, list | tuple) and len(value) == layers > 1 and not _are_layers(value, layers)


def _are_layers(value: Sequence[Any], layers: int) -> bool:
    """Return whether a list names all layers by their numbers."""
    return layers > 1 and list(value) == list(range(layers))


def _num_layers(config: PretrainedConfig) -> int:
    named: list[Any] = [getattr(config, name, None) for name in _LAYERS]
    return next((int(found) for found in named if _is_count(found)), 2)


def _rotated(config: PretrainedConfig) -> tuple[int, int]:
    """Return how many elements of a head rope rotates: in the model, and in the tiny one."""
    heads = next((int(found) for name in _HEADS if (found := getattr(config, name, None))), 1)
    rope = getattr(config, "qk_rope_head_dim", None)
    own = rope or getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads
    return int(own), min(int(own), 8 if rope else 16)


def _tiny_rope(parameters: Mapping[str, Any], rotated: tuple[int, int]) -> dict[str, Any]:
    """Return rope parameters with a small original length, and lists with an entry for each pair cut to the pairs."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            found[name] = _tiny_rope(value, rotated)
        elif isinstance(value, list) and name != "mrope_section":
            found[name] = value[: max(1, len(value) * rotated[1] // rotated[0])]
        elif _is_count(value):
            found[name] = min(value, THRESHOLDS.get(name, value))
        else:
            found[name] = copy.deepcopy(value)
    if isinstance(sections := parameters.get("mrope_section"), list):
        found["mrope_section"] = _scaled(sections, max(1, sum(sections) * rotated[1] // rotated[0]))
    return found


def _scaled(sections: Sequence[int], total: int) -> list[int]:
    """Return sections of about the same proportions that sum to `total`."""
    small = [each * total // sum(sections) for each in sections]
    small[0] += total - sum(small)
    return small


def _with_small_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with every token id inside the vocabulary; ids that were too large get different ones."""
    size, from_end = int(values.get("vocab_size") or VOCAB_SIZE), count(2)
    found = dict(values)
    for name, value in values.items():
        if name.endswith(("_token_id", "_token_index", "pad_index", "eos_index")):
            if _is_count(value) and value >= size:
                found[name] = size - next(from_end)
            elif isinstance(value, list):
                found[name] = [min(each, size - 1) for each in value if isinstance(each, int)]
    return found


def _rope_parts(parameters: Any) -> list[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return []
    return [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
