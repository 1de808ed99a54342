"""Configurations of GGUF files: those of the models that were written, and refusals of what they cannot say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.checkpoint.gguf.config import configuration, plain_tensors
from common.checkpoint.gguf.folder import WEIGHTS, gguf_folder, read_places
from common.checkpoint.gguf.header import read_header
from common.contracts.errors import InvalidConfig
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.gguf_files import FAMILIES, finish, model_of, write_model

_SAME = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    " max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id rope_parameters"
).split()
_OF_GEMMA = (
    "head_dim hidden_activation query_pre_attn_scalar sliding_window layer_types final_logit_softcapping".split()
)
Facts = Callable[[GGUFWriter], None]


def config_of(path: Path, tmp_path: Path) -> Any:
    """Return the configuration as transformers reads it from the config.json that a file stands for."""
    (tmp_path / "config.json").write_text(json.dumps(configuration(read_header(path))))
    return AutoConfig.from_pretrained(tmp_path)


def refusal(path: Path) -> str:
    header = read_header(path)
    with pytest.raises(InvalidConfig) as caught:
        configuration(header), list(plain_tensors(header))
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_configuration_of_its_model(tmp_path: Path, family: str, tied: bool) -> None:
    found = config_of(write_model(tmp_path / "m.gguf", family, tied=tied), tmp_path)
    wanted, weights = model_of(family, tied)
    same = [*_SAME, *(_OF_GEMMA if family == "gemma3" else ["hidden_act"])]
    assert {name: getattr(found, name, None) for name in same} == {name: getattr(wanted, name, None) for name in same}
    header = read_header(tmp_path / "m.gguf")
    assert {each.name: each.stored.shape for each in plain_tensors(header)} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("Q4_1", "bfloat16")]
)
def test_floats_keep_what_they_hold_and_quantised_models_compute_in_bfloat16(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    assert configuration(read_header(write_model(tmp_path / "m.gguf", kind=kind)))["dtype"] == dtype


def with_rope_factors(factors: Any) -> Facts:
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))


def llama3_factors(factor: float) -> Any:
    """Return the divisors of a Llama 3 model's frequencies, by transformers' own computation."""
    rope: dict[str, Any] = {"rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_of_llama_3_is_found_from_its_factors(tmp_path: Path, factor: float) -> None:
    path = write_model(tmp_path / "m.gguf", facts=with_rope_factors(llama3_factors(factor)))
    rope = config_of(path, tmp_path).rope_parameters
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": pytest.approx(factor, rel=1e-6),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_another_table_of_rope_factors_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", facts=with_rope_factors(np.linspace(1, 3, 32)))
    assert "rope_freqs.weight is not that of Llama 3" in refusal(path)


def scaled(kind: RopeScalingType, factor: float) -> Facts:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(128)

    return add


def test_linear_and_yarn_scaling_are_kept(tmp_path: Path) -> None:
    linear = config_of(write_model(tmp_path / "l.gguf", facts=scaled(RopeScalingType.LINEAR, 2.0)), tmp_path)
    assert (linear.rope_parameters["rope_type"], linear.rope_parameters["factor"]) == ("linear", 2.0)
    yarn = config_of(write_model(tmp_path / "y.gguf", facts=scaled(RopeScalingType.YARN, 4.0)), tmp_path)
    assert yarn.rope_parameters["rope_type"] == "yarn"
    assert (yarn.rope_parameters["factor"], yarn.rope_parameters["original_max_position_embeddings"]) == (4.0, 128)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (scaled(RopeScalingType.LONGROPE, 2.0), "its rope is scaled by longrope; linear, yarn and that of Llama 3"),
        (lambda writer: writer.add_expert_count(8), "it has 8 experts; of GGUF files only dense models are served"),
        (lambda writer: writer.add_uint16("split.count", 3), "it is one of 3 files of a model; merge them"),
        (lambda writer: writer.add_sliding_window(64), "its attention sees 64 tokens"),
        (lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((2, 2), np.float32)), "ffn_gate_inp"),
        (lambda writer: writer.add_head_count([4, 2]), "llama.attention.head_count is [4, 2]; expected one number"),
    ],
    ids=["longrope", "experts", "split", "window", "tensor", "layers differ"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_plain_model_does_not_have_is_refused(tmp_path: Path, facts: Facts, words: str) -> None:
    assert words in refusal(write_model(tmp_path / "m.gguf", facts=facts))


def test_another_architecture_is_named_with_those_that_are_served(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    said = refusal(finish(writer, tmp_path / "m.gguf"))
    assert "its architecture is gemma2; of GGUF files llama, qwen2, qwen3, gemma3 are served" in said
    assert "Hugging Face format instead" in said


def gemma3_file(path: Path, layers: int, heads: int, facts: Facts = lambda _: None) -> Path:
    """Write what a file of gemma3 says, as it is converted: without a pattern of layers and without the nearer rope."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_tensor("token_embd.weight", np.ones((8, 5376), np.float32))
    writer.add_block_count(layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(5376)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(128)
    writer.add_sliding_window(1024)
    facts(writer)
    return finish(writer, path)


def test_what_a_file_of_gemma3_leaves_out_is_what_the_family_has(tmp_path: Path) -> None:
    found = configuration(read_header(gemma3_file(tmp_path / "m.gguf", 7, 32)))
    assert found["model_type"] == "gemma3_text"
    assert found["layer_types"] == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert {name: rope["rope_theta"] for name, rope in found["rope_parameters"].items()} == {
        "full_attention": 1e6,
        "sliding_attention": 1e4,
    }
    assert (found["query_pre_attn_scalar"], found["final_logit_softcapping"]) == (128, None)


def test_the_gemma3_of_27b_scales_its_scores_by_hidden_over_heads(tmp_path: Path) -> None:
    assert configuration(read_header(gemma3_file(tmp_path / "m.gguf", 62, 32)))["query_pre_attn_scalar"] == 168


def test_what_a_file_of_gemma3_says_of_its_layers_and_ropes_goes_first(tmp_path: Path) -> None:
    def facts(writer: GGUFWriter) -> None:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_float32("gemma3.rope.freq_base_swa", 20000.0)
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_final_logit_softcapping(30.0)

    found = configuration(read_header(gemma3_file(tmp_path / "m.gguf", 4, 32, facts)))
    assert found["layer_types"] == [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]
    ropes = found["rope_parameters"]
    assert ropes["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert ropes["sliding_attention"] == {"rope_type": "default", "rope_theta": 2e4}
    assert found["final_logit_softcapping"] == 30.0


@pytest.mark.parametrize("family", ["bert", "nomic-bert", "jina-bert-v2"])
def test_a_file_of_an_encoder_says_which_server_takes_it(tmp_path: Path, family: str) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", family)
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    said = refusal(finish(writer, tmp_path / "m.gguf"))
    assert f"{family} is an encoder, for embeddings or reranking" in said
    assert "text-embeddings-inference or infinity" in said


def test_a_missing_number_and_a_missing_embedding_are_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_tensor("output_norm.weight", np.ones(2, np.float32))
    assert "token_embd.weight is missing" in refusal(finish(writer, tmp_path / "m.gguf"))
    writer = GGUFWriter(tmp_path / "n.gguf", "qwen3")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    assert "qwen3.attention.head_count is missing" in refusal(finish(writer, tmp_path / "n.gguf"))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (lambda w: w.add_block_count(2**32 - 1), "llama.block_count is 4294967295; expected at most 4096"),
        (
            lambda w: w.add_block_count(3),
            "llama.block_count is 3, and its tensors are of 2 layers; download or convert",
        ),
        (lambda w: w.add_embedding_length(2**30), "llama.embedding_length is 1073741824; expected at most 16777216"),
        (lambda w: w.add_head_count(0), "llama.attention.head_count is 0; expected one number for all layers"),
        (
            lambda w: w.add_bool("llama.attention.head_count_kv", True),
            "llama.attention.head_count_kv is True; expected",
        ),
        (lambda w: w.add_int32("llama.attention.key_length", -64), "llama.attention.key_length is -64; expected one"),
        (lambda w: w.add_head_count_kv(3), "num_key_value_heads is 3, which does not divide the 4 of"),
        (
            lambda w: w.add_rope_freq_base(float("nan")),
            "rope_parameters.rope_theta is nan; expected a number above 0 and at most 1e+15",
        ),
        (lambda w: w.add_string("llama.rope.freq_base", "hot"), "its metadata do not make a model"),
        (lambda w: w.add_token_list(["x" * 1025] * VOCAB_SIZE), "a token has 1025 characters; expected at most 1024"),
        (lambda w: w.add_array("tokenizer.ggml.tokens", [1] * VOCAB_SIZE), "its metadata do not make a model"),
    ],
)
def test_numbers_that_no_model_has_are_refused(
    facts: Facts, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def replaced(writer: GGUFWriter) -> None:
        given = {**writer.kv_data[0]}
        writer.kv_data[0].clear()
        facts(writer)
        writer.kv_data[0] = given | writer.kv_data[0]

    path = write_model(tmp_path / "m.gguf", facts=replaced)
    with pytest.raises(InvalidConfig) as caught:
        gguf_folder(path)
    assert f"{path}: {words}" in caught.value.violations[0].description


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: 5,
        lambda entry: entry[:-1],
        lambda entry: ["F99", *entry[1:]],
        lambda entry: [entry[0], [-1], *entry[2:]],
        lambda entry: [*entry[:2], 10**12, *entry[3:]],
        lambda entry: [*entry[:2], -8, *entry[3:]],
        lambda entry: [*entry[:3], entry[3] + 1, *entry[4:]],
        lambda entry: [*entry[:4], "4", entry[5]],
    ],
)
def test_an_index_that_others_wrote_is_checked(
    change: Callable[[list[Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_folder(write_model(tmp_path / "m.gguf"))
    assert read_places(folder)["model.norm.weight"].stored.shape == (256,)
    index = json.loads((folder / WEIGHTS).read_text())
    index["model.norm.weight"] = change(index["model.norm.weight"])
    (folder / WEIGHTS).write_text(json.dumps(index))
    with pytest.raises(InvalidConfig, match=r"tensor 'model.norm.weight' is not in .*m.gguf as the index says"):
        read_places(folder)


def test_numbers_of_float32_are_the_decimals_that_they_stand_for(tmp_path: Path) -> None:
    found = configuration(read_header(write_model(tmp_path / "m.gguf")))
    assert math.isclose(found["rms_norm_eps"], 1e-5, rel_tol=0, abs_tol=0)
