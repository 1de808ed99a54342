"""The models of the GPU benchmarks: two common shapes, and a tiny one for correctness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from gpuworker.models.llama.spec import LlamaSpec, llama_spec

MAX_POSITIONS = 8192
_LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
_QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "initializer_range": 0.1,
}
Shape = tuple[Callable[..., PretrainedConfig], dict[str, Any]]
MODELS: dict[str, Shape] = {
    "llama_8b": (LlamaConfig, _LLAMA_8B),
    "qwen3_06b": (Qwen3Config, _QWEN3_06B),
}
TINY: Shape = (Qwen3Config, _TINY)


def config_of(model: Shape) -> PretrainedConfig:
    kind, shape = model
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return kind(**shape, **ids, max_position_embeddings=MAX_POSITIONS)


def spec_of(model: Shape) -> LlamaSpec:
    spec = llama_spec(config_of(model))
    assert spec is not None
    return spec
