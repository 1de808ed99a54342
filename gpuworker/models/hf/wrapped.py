"""The configuration of a language model that lies in a model of several media (common/checkpoint/wrappers.py)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from common.checkpoint.wrappers import SAME_FOR_TEXT, WRAPPERS, language_tensor
from common.contracts.errors import InvalidConfig
from gpuworker.checkpoints.stored_tensors import StoredTensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Entries of a rope with three positions a token, which are equal for text.
_OF_POSITIONS: Final = ("mrope_section", "mrope_interleaved")
# What a language model does whatever its configuration says, and its plain kind where its configuration says so.
_ALWAYS: Final[Mapping[str, Mapping[str, Any]]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}


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
