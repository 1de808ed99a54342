"""config.json of a plain model of the Llama family, read without transformers, whose import takes a second.

Plain means: a dense model whose layers are alike, with the default rotary embedding and no window, whose config.json
names every number that the native path reads and nothing that this module does not know. Such a configuration has one
meaning, which tests compare with transformers' own. Everything else is left to transformers: its defaults, its older
names, its checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Numbers that config.json must name: transformers has other defaults for each kind.
_SIZES: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)
_FULL: Final = "full_attention"
_KINDS: Final[Mapping[str, frozenset[str]]] = {
    "llama": frozenset({"head_dim", "attention_bias", "mlp_bias"}),
    "mistral": frozenset({"head_dim", "sliding_window"}),
    "qwen2": frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    "qwen3": frozenset(
        {"head_dim", "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
    ),
}
_READ: Final = frozenset(
    {
        *_SIZES,
        *("model_type", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "dtype", "torch_dtype"),
        *("rope_parameters", "rope_theta", "rope_scaling"),
    }
)
# Entries that no logit of a served model depends on.
_IDLE: Final = frozenset(
    {
        *("architectures", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache", "return_dict"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_name_or_path", "is_llama_config"),
        *("id2label", "label2id", "problem_type", "output_hidden_states", "transformers.js_config"),
    }
)
# Entries that say nothing with this value; transformers does not read the first.
_OFF: Final[Mapping[str, Any]] = {"rope_interleaved": False, "is_encoder_decoder": False, "chunk_size_feed_forward": 0}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """Stands where a PretrainedConfig is read: the same names, for the entries that a plain model has."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype | None
    sliding_window: None = None

    @property
    def layer_types(self) -> list[str] | None:
        """What each layer attends to, for the kinds that say it."""
        return [_FULL] * self.num_hidden_layers if "layer_types" in _KINDS[self.model_type] else None

    def get_text_config(self) -> PlainConfig:
        return self


def plain_config(directory: Path) -> PretrainedConfig | None:
    """Return the configuration of a plain model; None where transformers has to read it, or to refuse it."""
    try:
        found = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    config = _read(found) if isinstance(found, dict) else None
    return None if config is None else cast("PretrainedConfig", config)


def _read(entries: Mapping[str, Any]) -> PlainConfig | None:
    kind = entries.get("model_type")
    theta, dtype = _rope_theta(entries), entries.get("dtype", entries.get("torch_dtype"))
    if not isinstance(kind, str) or kind not in _KINDS or theta is None or dtype not in (None, *_DTYPES):
        return None
    if not _says_only_what_is_known(entries, _KINDS[kind]) or not _is_alike(kind, entries) or not _fits(kind, entries):
        return None
    return PlainConfig(
        model_type=kind,
        **{name: entries[name] for name in (*_SIZES, "hidden_act", "tie_word_embeddings")},
        head_dim=entries.get("head_dim") or entries["hidden_size"] // entries["num_attention_heads"],
        rms_norm_eps=float(entries["rms_norm_eps"]),
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
        attention_bias=entries.get("attention_bias") or False,
        mlp_bias=entries.get("mlp_bias") or False,
        dtype=None if dtype is None else _DTYPES[dtype],
    )


def _says_only_what_is_known(entries: Mapping[str, Any], of_kind: frozenset[str]) -> bool:
    unknown = {name: value for name, value in entries.items() if name not in _READ | _IDLE | of_kind}
    return all(value is None or (name in _OFF and value == _OFF[name]) for name, value in unknown.items())


def _is_alike(kind: str, entries: Mapping[str, Any]) -> bool:
    """Return whether every layer sees every position."""
    kinds, layers = entries.get("layer_types"), entries.get("num_hidden_layers")
    if kind == "mistral":  # without an entry, transformers gives it a window
        return entries.get("sliding_window", 0) is None
    return entries.get("use_sliding_window") in (None, False) and kinds in (None, [_FULL] * _count(layers))


def _fits(kind: str, entries: Mapping[str, Any]) -> bool:
    """Return whether every entry is there, of its type, and the sizes divide each other."""
    if any(_count(entries.get(name)) < 1 for name in _SIZES):
        return False
    head_dim, heads = entries.get("head_dim"), entries["num_attention_heads"]
    if kind == "qwen3" and head_dim is None:  # transformers gives it another size than the quotient
        return False
    checks: list[tuple[str, Callable[[Any], bool]]] = [
        ("head_dim", lambda value: value is None or _count(value) > 0),
        ("rms_norm_eps", lambda value: isinstance(value, float) and value > 0),
        ("hidden_act", lambda value: isinstance(value, str)),
        ("tie_word_embeddings", lambda value: isinstance(value, bool)),
        ("attention_bias", lambda value: value is None or isinstance(value, bool)),
        ("mlp_bias", lambda value: value is None or isinstance(value, bool)),
    ]
    if not all(check(entries.get(name)) for name, check in checks):
        return False
    return not (entries["hidden_size"] % heads or heads % entries["num_key_value_heads"])


def _rope_theta(entries: Mapping[str, Any]) -> float | None:
    """Return the base of the default rotary embedding, however it is named; None for another embedding."""
    parameters, theta = entries.get("rope_parameters"), entries.get("rope_theta")
    if entries.get("rope_scaling") is not None:
        return None
    if isinstance(parameters, dict) and theta is None and set(parameters) == {"rope_theta", "rope_type"}:
        theta = parameters["rope_theta"] if parameters["rope_type"] == "default" else None
    elif parameters is not None:
        return None
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        return None
    return float(theta) if theta > 0 else None


def _count(value: Any) -> int:
    """Return a whole number above 0; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
