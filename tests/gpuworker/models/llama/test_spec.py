"""What the native path reads from a configuration, what it refuses, and the table of rotations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from gpuworker.models.llama.spec import ExpertsSpec, LlamaSpec, llama_spec, rope_table, why_not_llama
from tests.support.checkpoints import config_of

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PLAIN = LlamaSpec(3, 32, 48, 4, 2, 8, 96, 1e-6, 8**-0.5, (None, None, None), False, False, False, False, False)
MIXTRAL = ExpertsSpec("mixtral", 4, 2, 48, True, (True, True, True))
MIXTRAL_SHAPE = SHAPE | {"num_local_experts": 4, "rms_norm_eps": 1e-6}
QWEN = ExpertsSpec("qwen3_moe", 8, 3, 16, False, (True, True, True))
QWEN_SHAPE = SHAPE | {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
OLMOE = ExpertsSpec("olmoe", 6, 2, 48, False, (True, True, True))
OLMOE_SHAPE = SHAPE | {"num_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
OLMOE_PLAIN = replace(PLAIN, qk_norm=True, joint_norm=True, experts=OLMOE)
QWEN_PLAIN = replace(PLAIN, qk_norm=True, experts=QWEN)
THETA = {"rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (LlamaConfig(**SHAPE), PLAIN),
        (LlamaConfig(**SHAPE, attention_bias=True), replace(PLAIN, qkv_bias=True, o_bias=True)),
        (LlamaConfig(**SHAPE, mlp_bias=True, tie_word_embeddings=True), replace(PLAIN, mlp_bias=True, tied=True)),
        (LlamaConfig(**SHAPE, head_dim=16), replace(PLAIN, head_dim=16, scale=0.25)),
        (MistralConfig(**SHAPE, sliding_window=5), replace(PLAIN, windows=(5, 5, 5))),
        (MistralConfig(**SHAPE, sliding_window=None), PLAIN),
        (Qwen2Config(**SHAPE, sliding_window=5), replace(PLAIN, qkv_bias=True)),
        (
            Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=2),
            replace(PLAIN, qkv_bias=True, windows=(None, None, 5)),
        ),
        (Qwen3Config(**SHAPE, head_dim=8), replace(PLAIN, qk_norm=True)),
        (
            Qwen3Config(**SHAPE, head_dim=8, attention_bias=True),
            replace(PLAIN, qk_norm=True, qkv_bias=True, o_bias=True),
        ),
        (MixtralConfig(**MIXTRAL_SHAPE), replace(PLAIN, experts=MIXTRAL)),
        (
            MixtralConfig(**MIXTRAL_SHAPE, sliding_window=5, router_jitter_noise=0.1),
            replace(PLAIN, windows=(5, 5, 5), experts=MIXTRAL),
        ),
        (OlmoeConfig(**OLMOE_SHAPE), OLMOE_PLAIN),
        (
            OlmoeConfig(**OLMOE_SHAPE, clip_qkv=8.0, norm_topk_prob=True, attention_bias=True),
            replace(OLMOE_PLAIN, clip=8.0, qkv_bias=True, o_bias=True, experts=replace(OLMOE, normalised=True)),
        ),
        (Qwen3MoeConfig(**QWEN_SHAPE), QWEN_PLAIN),
        (
            Qwen3MoeConfig(**QWEN_SHAPE, norm_topk_prob=True, attention_bias=True),
            replace(QWEN_PLAIN, qkv_bias=True, o_bias=True, experts=replace(QWEN, normalised=True)),
        ),
        (
            Qwen3MoeConfig(**QWEN_SHAPE, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5),
            replace(QWEN_PLAIN, windows=(5, 5, 5), experts=replace(QWEN, layers=(False, True, False))),
        ),
        (
            Qwen3MoeConfig(**QWEN_SHAPE, mlp_only_layers=[0, 2]),
            replace(QWEN_PLAIN, experts=replace(QWEN, layers=(False, True, False))),
        ),
        (Qwen3MoeConfig(**QWEN_SHAPE, mlp_only_layers=[0, 1, 2]), replace(QWEN_PLAIN, experts=None)),
        (Qwen3MoeConfig(**QWEN_SHAPE | {"num_experts": 0}), replace(QWEN_PLAIN, experts=None)),
    ],
    ids=lambda each: each.model_type if isinstance(each, PretrainedConfig) else "",
)
def test_a_configuration_is_read(config: PretrainedConfig, spec: LlamaSpec) -> None:
    assert why_not_llama(config) is None
    assert llama_spec(config) == spec


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("gemma2"), "gemma2 is not of the Llama family"),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), "its activation is gelu, not silu"),
        (LlamaConfig(**SHAPE, rope_parameters=THETA | {"rope_type": "dynamic", "factor": 2.0}), "of kind dynamic"),
        (LlamaConfig(**SHAPE, rope_parameters=THETA | {"partial_rotary_factor": 0.5}), "rotates only 0.5 of each head"),
        (MistralConfig(**(SHAPE | {"layer_types": ["full_attention"] * 3})), "names the kinds of its layers"),
        (MixtralConfig(**MIXTRAL_SHAPE, hidden_act="gelu"), "its activation is gelu, not silu"),
        (Qwen3MoeConfig(**(QWEN_SHAPE | {"num_experts_per_tok": 9})), "a token goes through 9 of its 8 experts"),
        (OlmoeConfig(**OLMOE_SHAPE, clip_qkv=-1.0), "clips queries, keys and values at -1.0"),
        (OlmoeConfig(**(OLMOE_SHAPE | {"sliding_window": 5})), "an olmoe with a window"),
        (Qwen2MoeConfig(**SHAPE), "qwen2_moe is not of the Llama family"),
    ],
)
def test_what_the_native_path_does_not_know_is_refused(config: PretrainedConfig, reason: str) -> None:
    found = why_not_llama(config)
    assert found is not None
    assert reason in found
    assert llama_spec(config) is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        LLAMA3 | {"original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_table_turns_a_head_as_transformers_does(rope: dict[str, Any]) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=THETA | rope)
    head = torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(head, head, *LlamaRotaryEmbedding(config)(head, torch.arange(64)[None]))
    cosine, sine = rope_table(config, 64).unbind(1)
    first, second = head[0, 0].chunk(2, dim=-1)
    apply_rope = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    torch.testing.assert_close(apply_rope, expected[0, 0])


def test_the_attention_factor_of_yarn_is_in_the_table() -> None:
    rope = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    table = rope_table(LlamaConfig(**SHAPE, rope_parameters=rope), 2)
    assert table[0, 0, 0].item() == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
