"""Checkpoints for benchmarks: Llama-shaped, of random weights from a fixed seed, which are made as they are loaded.

The weights have a standard deviation of 0.1. With the usual 0.02 a random model with tied embeddings repeats one token,
and tokens of two engines would agree by luck.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_LLAMA: Final[Mapping[str, object]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SMALL: Final[Mapping[str, object]] = {
    **_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
MEDIUM: Final[Mapping[str, object]] = {
    **_LLAMA,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
"""128.4 million parameters; the shape of the peers' model."""
HYBRID: Final[Mapping[str, object]] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "initializer_range": 0.1,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
}
"""A small qwen3_next: three of four layers keep states."""
WINDOWED: Final[Mapping[str, object]] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "initializer_range": 0.1,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 4096,
}
"""A small gemma4: five of six layers have a window."""
MAX_MODEL_LEN: Final = 2048


@contextmanager
def checkpoint(model: str | None, shape: Mapping[str, object] = MEDIUM) -> Iterator[tuple[Path, str]]:
    """Yield a folder and its load format: that of `model`, else one of random weights that lasts for the block."""
    if model is not None:
        yield Path(model).expanduser(), "auto"
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-model-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(shape)))
        yield Path(folder), "dummy"
