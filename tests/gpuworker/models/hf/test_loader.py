"""Loading: directories, precision, random weights, and kinds of models that are refused by their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, ReformerConfig, T5Config

from common.checkpoint.hub import checkpoint_directory
from common.contracts.errors import InvalidConfig, Unsupported
from gpuworker.models.hf.loader import (
    ModelSource,
    context_limit,
    load_model,
    refuse_unsupported,
)
from gpuworker.models.hf.model import IMPLEMENTATION, TransformersModel
from gpuworker.models.llama.spec import why_not_llama
from gpuworker.models.self_test import CallRecorder
from gpuworker.plane.checkpoint_facts import eos_token_ids
from tests.support.checkpoints import SERVED, checkpoint, config_of
from tests.support.gpuworker.runner_harness import transformers_model

CPU = torch.device("cpu")


def load(**options: Any) -> TransformersModel:
    return load_model(ModelSource(str(checkpoint("llama")), **options), CPU)


def weights(model: TransformersModel) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in model.module.parameters()])


def test_the_checkpoints_own_precision_is_the_default() -> None:
    assert load().dtype == torch.float32


def test_another_precision_may_be_asked_for() -> None:
    assert load(dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(("asked", "kept"), [("auto", "bfloat16"), ("float32", "float32"), ("int8", "int8")])
def test_the_cache_has_a_type_of_its_own(asked: str, kept: str) -> None:
    assert load(dtype="bfloat16", kv_cache_dtype=asked).kv_dtype == kept


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_a_transformers_model_is_not_quantised_at_start(quantization: str) -> None:
    with pytest.raises(
        InvalidConfig, match=f"--quantization: {quantization} was asked for, and llama runs on transformers"
    ):
        load(quantization=quantization)


def test_auto_says_that_a_transformers_model_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load(quantization="auto")
    assert "llama runs on transformers: its linear layers stay in float32" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "big"},
        {"num_attention_heads": 0},
        {"rope_parameters": 7},
        {"layer_types": 3},
        {"text_config": {"a": 1}},
        {"attention_dropout": None, "model_type": "qwen2_vl"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_configuration_of_wrong_values_is_refused_in_words(wrong: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(InvalidConfig) as caught:
        load_model(ModelSource(str(tmp_path), load_format="dummy"), CPU)
    (found,) = caught.value.violations
    assert found.description.startswith(f"{tmp_path}/config.json is not a configuration that transformers can read: ")
    assert len(found.description) < 500


@pytest.mark.parametrize(("dtype", "advice"), [("float16", True), ("float32", False)])
def test_float16_through_transformers_comes_with_advice(
    dtype: str, advice: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load(dtype=dtype)
    assert ("in float16, which is slow on a CPU; --dtype bfloat16 or float32 is faster" in caplog.text) == advice


def test_random_weights_depend_on_the_seed_alone() -> None:
    first = weights(load(load_format="dummy", seed=1))
    torch.manual_seed(12345)
    assert torch.equal(first, weights(load(load_format="dummy", seed=1)))
    assert not torch.equal(first, weights(load(load_format="dummy", seed=2)))


def test_random_weights_leave_the_generator_of_others_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load(load_format="dummy", seed=1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "--dtype: 'int3'"),
        ({"load_format": "zip"}, "--load-format: 'zip'"),
        ({"kv_cache_dtype": "int3"}, "--kv-cache-dtype: 'int3'"),
        ({"quantization": "int3"}, "--quantization: 'int3'"),
    ],
)
def test_an_option_that_is_unknown_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        load(**options)


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no config\.json"):
        load_model(ModelSource(str(tmp_path)), CPU)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="cannot load"):
        load_model(ModelSource(str(tmp_path)), CPU)


def test_a_kind_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(InvalidConfig, match=r"is not a configuration that transformers can read: .*no_such_model"):
        load_model(ModelSource(str(tmp_path)), CPU)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_kind_that_is_no_decoder_is_refused(tmp_path: Path, load_format: str) -> None:
    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises((InvalidConfig, Unsupported)):
        load_model(ModelSource(str(tmp_path), load_format=load_format), CPU)


def test_what_is_neither_directory_nor_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is not a local directory"):
        checkpoint_directory(str(tmp_path / "missing" / "there"))


def test_the_ends_of_both_configurations_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert eos_token_ids(tmp_path) == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3, 7]}))
    assert eos_token_ids(tmp_path) == (3, 7, 9)


def llama(**options: Any) -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=2, max_position_embeddings=4096, **options)


def test_the_context_ends_where_positions_do() -> None:
    assert context_limit(llama()) == 4096


def test_longrope_is_run_up_to_its_original_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "original_max_position_embeddings": 512,
    }
    assert context_limit(llama(rope_parameters=rope)) == 512


def test_rotary_scaling_by_the_batch_is_refused() -> None:
    with pytest.raises(Unsupported, match="longest sequence of a batch"):
        refuse_unsupported(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))


@pytest.mark.parametrize("kind", SERVED)
def test_hidden_states_are_those_of_the_model_without_its_head(kind: str) -> None:
    model, tokens = transformers_model(checkpoint(kind)), torch.arange(5, 14)
    caller: Any = model.module
    caller.set_attn_implementation("eager")
    with torch.inference_mode():
        inner = caller.model if kind == "llama4_text" else caller.base_model
        expected = inner(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    caller.set_attn_implementation(IMPLEMENTATION)
    every = torch.arange(len(tokens))
    torch.testing.assert_close(
        model.hidden_states(tokens, every, every, CallRecorder()), expected, rtol=1e-3, atol=1e-3
    )


def test_layers_of_unknown_kinds_are_refused() -> None:
    config = llama()
    config.layer_types = ["full_attention", "compressed_sparse_attention"]
    with pytest.raises(Unsupported, match="layers of kind compressed_sparse_attention"):
        refuse_unsupported(config)


def test_layers_of_several_shapes_are_refused_where_transformers_has_no_such_model(tmp_path: Path) -> None:
    config = llama(per_layer_config={0: {"num_key_value_heads": 8}})
    assert why_not_llama(config) == "its layers differ in num_key_value_heads"
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=r"--model: cannot load .*'num_key_value_heads' is a per-layer attribute"):
        load_model(ModelSource(str(tmp_path), load_format="dummy"), CPU)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_transformers_cannot_build_is_refused(load_format: str, tmp_path: Path) -> None:
    """Its class asserts that `is_decoder` is set."""
    ReformerConfig().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"--model: cannot load .*is_decoder=True"):
        load_model(ModelSource(str(tmp_path), load_format=load_format), CPU)
