"""Writes common/checkpoint/model_defaults.json: numbers that transformers adds where a config.json leaves them out."""

from __future__ import annotations

import json
from typing import Any, Final

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.checkpoint.completed import DEFAULTS, TEXT

# What a process without transformers asks a configuration for.
_NUMBERS: Final = (
    *("vocab_size", "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"),
    *("n_ctx", "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads", "hidden_size"),
    *("n_embd", "d_model", "head_dim", "num_key_value_heads"),
)


def model_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of every causal language model, and of the text models inside of others, by `model_type`."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found[kind] = _of(kind)
            if TEXT in found[kind]:
                waiting.append(found[kind][TEXT])
    return dict(sorted(found.items()))


def _of(kind: str) -> dict[str, Any]:
    """Return the numbers that the class itself declares; those that it computes of others are left out."""
    made = CONFIG_MAPPING[kind]
    spec = made.sub_configs_defaults.get(TEXT)
    if spec is not None:
        return {TEXT: spec.model_type}
    declared = {name: each.default for name, each in made.__dataclass_fields__.items()}
    numbers = {name: declared[name] for name in _NUMBERS if type(declared.get(name)) is int}
    ends = declared.get("eos_token_id")
    return numbers | ({"eos_token_id": ends} if isinstance(ends, int | list) else {})


def text() -> str:
    """Return the file: one kind a line."""
    rows = (f"  {json.dumps(kind)}: {json.dumps(numbers)}" for kind, numbers in model_defaults().items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def write() -> None:
    DEFAULTS.write_text(text(), encoding="utf-8")
