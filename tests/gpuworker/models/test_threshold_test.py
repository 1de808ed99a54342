"""The test beyond the thresholds of a configuration: on a tiny model of the same kind, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from common.contracts.errors import Unsupported
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.hf.loader import context_limit
from gpuworker.models.hf.tiny import THRESHOLDS, thresholds, tiny_config
from gpuworker.models.self_test import CallRecorder, self_test
from gpuworker.models.threshold_test import beyond_thresholds, tiny_model

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}


def config(kind: str, **options: Any) -> PretrainedConfig:
    """Return a configuration of real sizes."""
    made: PretrainedConfig = getattr(transformers, kind)(**options)
    return made


def backend(cache: KvCache) -> Any:
    return make_backend("auto", cache)


def run(config: PretrainedConfig, attention: Any = backend) -> list[int]:
    """Run the test; return how long the sequences were, one for each time."""
    lengths = []

    def test(tiny: PretrainedConfig, length: int) -> None:
        lengths.append(length)
        self_test(tiny_model(tiny, CPU), attention, length=length)

    beyond_thresholds(config, test)
    return lengths


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (config("LlamaConfig"), {}),
        (config("MistralConfig", sliding_window=4096), {"sliding_window": 4096}),
        (config("MistralConfig", sliding_window=None), {}),
        (config("MistralConfig", sliding_window=4096, max_position_embeddings=4096), {}),
        (config("Qwen2Config", sliding_window=4096), {}),
        (config("Llama4TextConfig"), {"attention_chunk_size": 8192, "floor_scale": 8192}),
        (
            config(
                "LlamaConfig", rope_parameters={**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 512}
            ),
            {"original_max_position_embeddings": 512},
        ),
        (config("Gemma3Config"), {"sliding_window": 4096}),
        (config("Phi3Config", rope_parameters=LONGROPE, sliding_window=2047), {"sliding_window": 2047}),
    ],
    ids=lambda each: each.model_type if isinstance(each, PretrainedConfig) else "",
)
def test_thresholds_are_those_that_a_sequence_can_pass(made: PretrainedConfig, named: dict[str, int]) -> None:
    assert thresholds(made, context_limit(made)) == named


@pytest.mark.parametrize(
    "made",
    [
        config("MistralConfig", sliding_window=4096),
        config("Gemma2Config"),
        config("Gemma3Config"),
        config("GptOssConfig"),
        config("Phi3Config", rope_parameters=LONGROPE, sliding_window=2047),
        config("Starcoder2Config", sliding_window=4096, max_position_embeddings=16384),
        config("DeepseekV3Config", rope_parameters=YARN, max_position_embeddings=163840),
        config("Llama4TextConfig"),
        config("PhimoeConfig", sliding_window=4096),
        config("Qwen2MoeConfig", use_sliding_window=True),
        config("ZayaConfig", layer_types=["hybrid", "hybrid_sliding"] * 20, num_hidden_layers=40, sliding_window=4096),
    ],
    ids=lambda each: each.model_type,
)
def test_models_of_real_sizes_pass_in_a_moment(made: PretrainedConfig) -> None:
    lengths = run(made)
    tiny = tiny_config(made.get_text_config())
    assert lengths == [min(48, context_limit(tiny))]
    assert sum(each.numel() for each in tiny_model(tiny, CPU).module.parameters()) < 1 << 20


class ForgetsWindow(TorchAttention):
    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return super().write_and_attend(LayerAttention(layer.layer, layer.scale), query, key, value)


def test_attention_that_is_wrong_beyond_a_window_alone_is_found() -> None:
    with pytest.raises(
        Unsupported, match=r"mistral cannot be served beyond sliding_window 4096: tested tiny, .* differ"
    ):
        run(config("MistralConfig", sliding_window=4096), ForgetsWindow)


def test_positions_that_are_counted_inside_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama4's temperature follows the place of a token in the step, unless that is corrected."""
    made = config("Llama4TextConfig", layer_types=["full_attention"] * 48)
    assert run(made) == [48]
    monkeypatch.setattr("gpuworker.models.hf.model.correct_positions", lambda *_: None)
    with pytest.raises(
        Unsupported, match=r"beyond .* floor_scale 8192: tested tiny, .* through the paged cache, .* 0\.0"
    ):
        run(made)


class ForgetsChunk(TorchAttention):
    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return super().write_and_attend(replace(layer, chunk=None), query, key, value)


def test_attention_that_is_wrong_beyond_a_chunk_alone_is_found() -> None:
    made = config("Llama4TextConfig", attn_temperature_tuning=False)
    with pytest.raises(Unsupported, match=r"llama4_text cannot be served beyond attention_chunk_size 8192 .* differ"):
        run(made, ForgetsChunk)


@pytest.mark.parametrize(
    "made",
    [config("PhimoeConfig", sliding_window=4096), config("Qwen2MoeConfig", use_sliding_window=True)],
    ids=lambda each: each.model_type,
)
def test_windows_that_masks_alone_have_are_those_of_the_configuration(made: PretrainedConfig) -> None:
    """Neither hands its window to attention functions."""
    tiny = tiny_config(made)
    recorder, first = CallRecorder(), torch.zeros(1, dtype=torch.int64)
    tiny_model(tiny, CPU).forward(first, first, first, recorder)
    kinds = getattr(tiny, "layer_types", None) or ["sliding_attention"] * tiny.num_hidden_layers
    wanted = [8 if kind == "sliding_attention" else None for kind in kinds]
    assert wanted[0] == 8
    assert [layer.window for layer in recorder.layers] == wanted


def test_a_kind_of_which_no_tiny_model_can_be_made_is_refused() -> None:
    made = config("MistralConfig", sliding_window=4096)
    made.hidden_act = "no such activation"
    with pytest.raises(Unsupported, match="mistral cannot be tested beyond sliding_window 4096, so it is not served"):
        run(made)


def test_layers_that_differ_from_the_whole_differ_in_the_tiny_one() -> None:
    options = {"attention_k_eq_v": True, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
    tiny: Any = tiny_config(config("Gemma4TextConfig", num_attention_heads=16, **options))
    assert tiny.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    found = [(each.head_dim, each.num_key_value_heads) for each in tiny.per_layer_config]
    assert found == [(16, 2), (16, 2), (32, 1)]
    assert run(config("Gemma4TextConfig", num_attention_heads=16, **options)) == [48]


def test_a_tiny_configuration_keeps_kinds_of_layers_and_options() -> None:
    tiny = tiny_config(config("Gemma2Config", final_logit_softcapping=17.0))
    assert tiny.layer_types == ["sliding_attention", "full_attention"]
    assert tiny.final_logit_softcapping == 17.0
    assert tiny.sliding_window == THRESHOLDS["sliding_window"]


def test_layers_that_share_keys_have_a_layer_to_share_with() -> None:
    tiny = tiny_config(config("Gemma3nTextConfig"))
    assert tiny.layer_types[: tiny.num_kv_shared_layers] == tiny.layer_types[tiny.num_kv_shared_layers :]
    assert len(tiny.intermediate_size) == len(tiny.layer_types) == tiny.num_hidden_layers
