"""How many positions a model spans: its position embeddings, and what a scaled rotary embedding makes of them.

Checkpoints disagree about what `max_position_embeddings` counts where rope is scaled. Some name the positions after
the scaling, others those before it, as model cards tell users to write. Both are in use, so the larger number counts.

Models of which no layer attends name no positions. Such a model runs any length, and a sequence takes no more memory
the longer it is: a worker serves what its tokenizer names, or a usual number, unless an option says another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

CONTEXT_KEYS: Final = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"),
)
_ORIGINAL: Final = "original_max_position_embeddings"
# Kinds of which no layer attends, and what limits the length of their sequences.
ATTENTION_FREE: Final = ("mamba", "mamba2", "falcon_mamba")
MOST_OF_STATES: Final = 1 << 20
USUAL_OF_STATES: Final = 8192
# Kinds whose own configuration names the positions after the scaling, and not those before it.
_NAMES_SCALED: Final = ("gemma3",)


def context_of(config: Mapping[str, Any]) -> int | None:
    """Return the positions that a text model spans, by its configuration; None where it names none, and needs some.

    "yarn" and "linear" span their factor times the original positions. "longrope" changes the embedding of every
    position at once when a batch passes its original length, so that K/V of shorter sequences would no longer fit. Such
    a model runs up to that length. A rope for each kind of layer leaves the number as it is.
    """
    if runs_any_length(config):
        return MOST_OF_STATES
    named = _named(config)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if named is None or not isinstance(rope, Mapping):
        return named
    parts = [each for each in rope.values() if isinstance(each, Mapping)]
    for part in parts or [rope]:
        if _kind(part) in ("longrope", "su"):
            return _original(config, part) or named
    return named if parts else max(named, _scaled(config, rope, named))


def runs_any_length(config: Mapping[str, Any]) -> bool:
    """Return whether a text model has no positions: none is named, and no layer attends."""
    return config.get("model_type") in ATTENTION_FREE and _named(config) is None


def _named(config: Mapping[str, Any]) -> int | None:
    found: int | None = next((value for key in CONTEXT_KEYS if _is_count(value := config.get(key))), None)
    return found


def usual_of_states(tokenizer_config: Mapping[str, Any]) -> int:
    """Return the length that is served of a model that runs any, by its tokenizer's configuration.

    A tokenizer without a limit names 10^30, which counts as none.
    """
    named: Any = tokenizer_config.get("model_max_length")
    return int(named) if _is_count(named) and named <= MOST_OF_STATES else USUAL_OF_STATES


def _scaled(config: Mapping[str, Any], rope: Mapping[str, Any], named: int) -> int:
    """Return the positions after the scaling; 0 for a rope that is not stretched by a factor."""
    if _kind(rope) not in ("yarn", "linear") or str(config.get("model_type")).startswith(_NAMES_SCALED):
        return 0
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not math.isfinite(factor):
        return 0
    return int((_original(config, rope) or named) * factor)


def _original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    """Return the positions before the scaling. An entry beside the rope's wins, as for transformers."""
    return next((value for part in (config, rope) if _is_count(value := part.get(_ORIGINAL))), None)


def _kind(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
