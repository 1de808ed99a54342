"""Tiny models of the Llama family with every option that the native path supports, and steps to run them through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.spec import LlamaSpec, llama_spec
from gpuworker.models.llama.weights import with_merged_experts

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, scaled": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "qwen2, a window above": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_key_value_heads": 4},
    ),
    "qwen3, wide heads": ("Qwen3Config", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3 with biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "mistral, a window": ("MistralConfig", {"sliding_window": 6, "head_dim": 8}),
}
# Models with experts.
EXPERT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, a window, all experts": (
        "MixtralConfig",
        {"sliding_window": 6, "num_local_experts": 3, "num_experts_per_tok": 3},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 40, "num_experts_per_tok": 5},
    ),
    "qwen3_moe, dense layers, normalised": (
        "Qwen3MoeConfig",
        {
            "moe_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "mlp_only_layers": [1],
        },
    ),
}

EXPERT_CASES |= {
    "olmoe": ("OlmoeConfig", {"num_experts": 7, "num_experts_per_tok": 3}),
    "olmoe, clipped, normalised, biases": (
        "OlmoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "clip_qkv": 0.8,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
}

BLOCK_SIZE = 4
_BLOCK_TABLE = np.array([[6, 1, 4, 3], [0, 5, 2, 7]], dtype=np.int32)
# Per step: start and length of two sequences. Two prefills; a decode beside a chunk; two decodes.
_STEPS = (((0, 9), (0, 6)), ((9, 1), (6, 9)), ((10, 1), (15, 1)))
STEP_LENGTHS = tuple(tuple(length for _, length in step) for step in _STEPS)


@dataclass(frozen=True, slots=True)
class Case:
    """A model as transformers runs it on a paged cache, and what the native path reads from it."""

    transformers_model: TransformersModel
    config: PretrainedConfig
    spec: LlamaSpec

    def tensor(self, name: str) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = self.transformers_model.module.state_dict()
        return with_merged_experts(tensors, tensors.__getitem__)(name)

    def cache(self, num_blocks: int = _BLOCK_TABLE.size) -> KvCache:
        """Return a cache; the steps of `steps` are on eight blocks."""
        spec = self.spec
        geometry = KvGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim, "float32")
        return KvCache(geometry, num_blocks, BLOCK_SIZE, torch.device("cpu"))


def make_case(name: str) -> Case:
    """Return one of the cases above in float32, with random norms and biases: those of a new model hide mistakes."""
    kind, options = (CASES | EXPERT_CASES)[name]
    config: PretrainedConfig = getattr(transformers, kind)(**(_SHAPE | options))
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for tensor in module.parameters():
                if tensor.dim() == 1:
                    tensor.add_(0.3 * torch.randn(tensor.shape))
    spec = llama_spec(config)
    assert spec is not None
    return Case(TransformersModel(module), config, spec)


def steps(model: Any, attention: AttentionBackend, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the logits [S, vocab] of steps over two sequences [2, 16]; every second token of a step is sampled."""
    device = tokens.device
    for step in _STEPS:
        start, length = np.array(step, dtype=np.int32).T
        rows = pack_rows(start, length, _BLOCK_TABLE, BLOCK_SIZE)
        *tables, row, position = to_device([*attention_arrays(rows), rows.row_of_token, rows.positions], device)
        attention.begin(attention_metadata(rows, tables))
        keep = torch.arange(1, len(position), 2, device=device)
        yield model.forward(tokens[row.long(), position.long()], position.long(), keep, attention)


def case_tokens(spec: LlamaSpec) -> torch.Tensor:
    """Return two sequences of sixteen random tokens."""
    return torch.randint(spec.vocab_size, (2, 16), generator=torch.Generator().manual_seed(3))
