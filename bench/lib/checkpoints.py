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
