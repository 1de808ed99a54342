"""The numbers of config.json that the suite computes with: each of its type and in a sane range, or named in words.

An entry that is missing or null has the default of its kind. Entries that no code here computes with are left to
transformers, which checks them when a worker loads the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.checkpoint.completed import TEXT, completed, text_part
from common.checkpoint.context import CONTEXT_KEYS, context_of

_MOST_POSITIONS: Final = 2**31 - 1
_MOST_WIDTH: Final = 1 << 22
# Sizes, and the most that each may be: several times what any published model has.
_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(CONTEXT_KEYS, _MOST_POSITIONS),
    "original_max_position_embeddings": _MOST_POSITIONS,
    "vocab_size": 1 << 24,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size"), _MOST_WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4096),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 1 << 16),
    "head_dim": 1 << 16,
}
# Sizes that some models have for each layer.
_OF_LAYERS: Final = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
)
# Numbers above 0, and numbers from 0 on.
_POSITIVE: Final = ("rope_theta", "rope_local_base_freq", "factor", "low_freq_factor", "high_freq_factor")
_FROM_ZERO: Final = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_LARGEST: Final = 1e15
_OBJECTS: Final = (TEXT, "quantization_config", "compression_config", "rope_scaling", "rope_parameters")
_ROPES: Final = ("rope_scaling", "rope_parameters")
_TEXTS: Final = ("model_type", "hidden_act", "hidden_activation", "rope_type", "type", "quant_method")
_LISTS_OF_TEXTS: Final = ("architectures", "layer_types")
_LATENT: Final = "qk_nope_head_dim"  # of latent attention, whose heads have sizes of other names; head_dim may be 0
_ENDS: Final = "eos_token_id"
_MOST_IDS: Final = 1024
_DTYPES: Final = ("dtype", "torch_dtype")
_MOST_LABELS: Final = 1 << 20
_FLAGS: Final = ("tie_word_embeddings", "is_encoder_decoder", "is_decoder")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What values of an entry are right, and how a message says it."""

    accepts: Callable[[Any], bool]
    expected: str


def _whole(most: int) -> _Kind:
    return _Kind(lambda value: type(value) is int and 0 < value <= most, f"a whole number from 1 to {most}")


def _between(low: float, high: float, open_low: bool = False) -> _Kind:
    def accepts(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (low < value if open_low else low <= value) and value <= high

    return _Kind(
        accepts, f"a number {'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
    )


def _each(kind: _Kind) -> _Kind:
    """Return the kind of an entry that may have a value for each layer."""
    return _Kind(
        lambda value: all(map(kind.accepts, value)) if isinstance(value, list) else kind.accepts(value), kind.expected
    )


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return len(ids) <= _MOST_IDS and all(each is None or (type(each) is int and each.bit_length() < 32) for each in ids)


_KINDS: Final[Mapping[str, _Kind]] = {
    **{name: _whole(most) for name, most in _SIZES.items()},
    **{name: _each(_whole(_SIZES[name])) for name in _OF_LAYERS},
    **dict.fromkeys(_POSITIVE, _each(_between(0, _LARGEST, open_low=True))),
    **dict.fromkeys(_FROM_ZERO, _between(0, _LARGEST)),
    **dict.fromkeys(_OBJECTS, _Kind(lambda value: isinstance(value, dict), "an object")),
    **dict.fromkeys(_TEXTS, _Kind(lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(
        _LISTS_OF_TEXTS,
        _Kind(
            lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of texts"
        ),
    ),
    **dict.fromkeys(_DTYPES, _Kind(lambda value: isinstance(value, str), "the name of a type, such as bfloat16")),
    **dict.fromkeys(_FLAGS, _Kind(lambda value: isinstance(value, bool), "true or false")),
    "num_labels": _Kind(
        lambda value: type(value) is int and 0 <= value <= _MOST_LABELS, f"a whole number from 0 to {_MOST_LABELS}"
    ),
    _ENDS: _Kind(_are_ids, "the id of a token, or a list of ids"),
}
# Advice of generation_config.json that requests without a value of their own follow.
_ADVICE: Final[Mapping[str, _Kind]] = {
    _ENDS: _KINDS[_ENDS],
    "temperature": _between(0, _LARGEST),
    "top_p": _between(0, 1, open_low=True),
    "min_p": _between(0, 1),
    "repetition_penalty": _between(0, _LARGEST, open_low=True),
    # No top_k is null, 0 or -1.
    "top_k": _Kind(lambda value: type(value) is int and -1 <= value < 1 << 31, "a whole number from -1 to 2147483647"),
    "max_new_tokens": _Kind(lambda value: type(value) is int and 0 <= value < 1 << 31, "a whole number from 0 on"),
}


def generation_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the advice of a generation_config.json, each with the name of its entry."""
    return [*_wrong(config, _ADVICE)]


def config_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the numbers of a configuration, each with the name of its entry."""
    found = [*_wrong(config, _KINDS)]
    return found or [*_contradictions(text_part(config), text_part(completed(config)))]


def _wrong(config: Mapping[str, Any], kinds: Mapping[str, _Kind], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        kind = kinds.get(name)
        if value is None or (name == "head_dim" and value == 0 and _LATENT in config):
            continue
        if kind is not None and not kind.accepts(value):
            yield f"{prefix}{name} is {shown(value)}; expected {kind.expected}"
        elif isinstance(value, dict) and (name == TEXT or name in _ROPES or prefix.startswith(_ROPES)):
            yield from _wrong(value, kinds, f"{prefix}{name}.")


def _contradictions(stated: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes of a text model that do not go together; what its family fills in contradicts nothing."""
    heads, shared = text.get("num_attention_heads"), stated.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and heads % shared:
        yield f"num_key_value_heads is {shared}, which does not divide the {heads} of num_attention_heads"
    hidden, has_own = text.get("hidden_size"), any(name.endswith("head_dim") and text[name] for name in text)
    if type(hidden) is int and type(heads) is int and hidden < heads and not has_own:
        yield f"hidden_size is {hidden}, less than the {heads} of num_attention_heads, and head_dim is missing"
    if (context := context_of(text) or 0) > _MOST_POSITIONS:
        yield f"its positions, scaled by rope, end at {shown(context)}; expected at most {_MOST_POSITIONS}"
