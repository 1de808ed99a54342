"""A random model with layers of linear attention that repeats texts: token t is followed by the next one of its cycle.

No trained small hybrid that copies is at hand. So what the layers add is scaled down by `faint`, and the head answers
each token with its successor in a cycle of `PERIOD` tokens. The work is that of the shape. Where `faint` is larger,
more tokens leave their cycle, as an edit leaves the text that it copies.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

PERIOD: Final = 64
VOCABULARY: Final = 8192
_MEDIUM: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
SHAPES: Final[Mapping[str, dict[str, Any]]] = {
    "medium": _MEDIUM,
    "small": _MEDIUM
    | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    | {"layer_types": _MEDIUM["layer_types"][:4]},
}
"""Three of four layers keep a state, as in Qwen3.5. The first has 77 million parameters."""
_LAST: Final = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # of what a layer adds


def begun_texts(count: int) -> list[list[int]]:
    """Return texts that have begun to repeat themselves."""
    rng = random.Random(1)
    begun = [(rng.randrange(VOCABULARY // PERIOD) * PERIOD, rng.randrange(PERIOD)) for _ in range(count)]
    return [[first + (at + n) % PERIOD for n in range(PERIOD + 16)] for first, at in begun]


def write_copying_hybrid(folder: Path, faint: float, shape: Mapping[str, Any]) -> Path:
    """Write a checkpoint in float32, and return its folder."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    tokens = torch.arange(VOCABULARY)
    following = tokens // PERIOD * PERIOD + (tokens + 1) % PERIOD
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**shape), dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.endswith(_LAST):
                weight.mul_(faint)
        embedding = torch.randn(VOCABULARY, shape["hidden_size"])
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight[following] = embedding
        model.save_pretrained(folder)
    return folder
