"""Tiny checkpoints with random weights in Hugging Face format, with a tokenizer, and their outputs under transformers.

Weights are sampled with a large deviation (0.3), so that greedy outputs vary from token to token and the two best
logits lie well apart. A checkpoint is made once per process, in a temporary directory that goes away with it.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
VOCAB_SIZE = 264
EOS = SPECIAL.index("</s>")
MAX_POSITIONS = 1024
WINDOW = 8
CHUNK = 12
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_GPT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
}
_LATENTS: dict[str, Any] = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_STATES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 8,
    "time_step_rank": 8,
}
_DELTA: dict[str, Any] = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_SHARED_EXPERT: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_GEMMA4: dict[str, Any] = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 30.0,
}
_COMMON: dict[str, Any] = {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}

# The kinds that Quire serves and, below, those that it must refuse.
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SHAPE),
    "qwen3": ("Qwen3Config", {**_SHAPE, "head_dim": 32}),
    "mistral": ("MistralConfig", {**_SHAPE, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {**_SHAPE, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2Config", _GPT_SHAPE),
    "mixtral": (
        "MixtralConfig",
        {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_SHAPE,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("OlmoeConfig", {**_SHAPE, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 2.0}),
    "gpt_oss": (
        "GptOssConfig",
        {**_SHAPE, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # Layers that attend in chunks, beside one without rope that scales its queries by their positions.
    "llama4_text": (
        "Llama4TextConfig",
        {
            **_SHAPE,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": CHUNK,
            "floor_scale": 10,
        },
    ),
    # Layers that keep a state, beside one that attends: gated delta rule with experts, short convolutions, state spaces
    # whose chunks transformers goes on with, and state spaces whose chunks it does not.
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_SHARED_EXPERT}),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {name: size for name, size in _DELTA.items() if name != "intermediate_size"} | _SHARED_EXPERT,
    ),
    "lfm2": ("Lfm2Config", {**_SHAPE, "layer_types": ["conv", "full_attention", "conv"]}),
    "minimax": (
        "MiniMaxConfig",
        {**_SHAPE, "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_SHAPE,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
        },
    ),
    "jamba": (
        "JambaConfig",
        {**_SHAPE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
        | {"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    ),
    # Attention on queries, keys and values that convolutions make of neighbours.
    "zaya": (
        "ZayaConfig",
        {
            **{name: size for name, size in _SHAPE.items() if name != "intermediate_size"},
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "router_hidden_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    # State spaces beside attention, whose weights two layers share.
    "zamba2": (
        "Zamba2Config",
        {
            **_SHAPE,
            "num_key_value_heads": 4,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "chunk_size": 8,
            "time_step_min": 1e-6,  # in prefills transformers bounds time steps by it, and nowhere else
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
        },
    ),
    # State spaces alone: no layer attends.
    "mamba": ("MambaConfig", _STATES),
    "falcon_mamba": ("FalconMambaConfig", _STATES),
    "mamba2": ("Mamba2Config", {**_STATES, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "deepseek_v3": ("DeepseekV3Config", _LATENTS),
    "deepseek_v32": ("DeepseekV32Config", {**_LATENTS, "index_topk": 9, "index_n_heads": 16, "index_head_dim": 16}),
}
REPRESENTATIVES = frozenset(
    {
        *("llama", "gpt2", "mistral", "gemma2", "llama4_text", "mixtral", "deepseek_v3"),
        *("qwen3_next", "lfm2", "minimax", "zaya", "mamba2"),
    }
)
"""Of each kind of layers and of memory one: `.ci/run` tries these with blocks of several sizes, the others of one."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": (
        "FalconConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJConfig", {**_GPT_SHAPE, "n_layer": 2, "rotary_dim": 8}),
}


# Kinds of which some tests make checkpoints besides.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_SHAPE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    # Layers of two shapes, of which the last two attend on the K and V of others and take more of their tokens; and
    # layers whose values are their keys, with experts beside their MLPs.
    "gemma4_text": (
        "Gemma4TextConfig",
        {**_GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16},
    ),
    "gemma4_text, experts": (
        "Gemma4TextConfig",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
}


def config_of(kind: str) -> PretrainedConfig:
    """Return the configuration of one of the kinds above."""
    name, options = (SERVED | REFUSED | OTHERS)[kind]
    config: PretrainedConfig = getattr(transformers, name)(**options, **_COMMON)
    config.architectures = [name.removesuffix("Config") + ("LMHeadModel" if kind == "gpt2" else "ForCausalLM")]
    return config


@functools.cache
def checkpoint(kind: str, seed: int = 0) -> Path:
    """Return the directory of a checkpoint of one of the kinds above: weights, configuration and tokenizer."""
    directory = _root() / f"{kind}-{seed}"
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32, attn_implementation="eager")
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@functools.cache
def nearly(kind: str, noise: float = 0.02) -> Path:
    """Return a checkpoint whose outputs are those of `checkpoint(kind)` in parts: its weights with noise on them."""
    directory = _root() / f"{kind}-nearly-{noise}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte, so that any text has one and characters span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = _TEMPLATE
    return made


@functools.cache
def reference_model(directory: Path) -> PreTrainedModel:
    """Return the model as transformers runs it, in float32 on CPU, with an end only where the caller puts one."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def hf_greedy(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens that Hugging Face `generate` appends greedily to a prompt; no token ends it."""
    return list(_generate(directory, tuple(prompt), count))


@functools.cache
def _generate(directory: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model: Any = reference_model(directory)
    with torch.inference_mode():
        out = model.generate(ids, **options)
    return tuple(out[0, len(prompt) :].tolist())


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="quire-checkpoints-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
