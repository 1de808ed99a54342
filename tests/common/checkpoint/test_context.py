"""The positions of a model whose rope is scaled, as configurations of public families have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, Qwen2Config

from common.checkpoint.context import MOST_OF_STATES, USUAL_OF_STATES, context_of, runs_any_length, usual_of_states
from gpuworker.models.hf.loader import context_limit
from gpuworker.plane.checkpoint_facts import CheckpointFacts
from router.answers.text.checkpoint import read_checkpoint
from tests.support.checkpoints import checkpoint

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("positions", "more", "context"),
    [
        (512, {"rope_scaling": YARN}, 2048),  # what the model card of Qwen2.5 tells users to add
        (640, {"rope_scaling": YARN}, 2048),  # Qwen3: room for the answer beside the original
        (2048, {"rope_scaling": YARN}, 2048),  # DeepSeek, gpt-oss: after the scaling
        (4096, {"rope_scaling": YARN}, 4096),
        (512, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        (512, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, 2048),
        (512, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        (512, {"rope_scaling": {"rope_type": "linear", "factor": 4}}, 2048),
        (512, {"rope_scaling": {"type": "linear", "factor": 2.5}}, 1280),
        (512, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN}, 1024),
        (512, {"rope_scaling": YARN, "original_max_position_embeddings": 256}, 1024),
        (4096, {"rope_scaling": LLAMA3}, 4096),
        (512, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 512),
        (512, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 512),
        (2048, {"rope_scaling": LONG | {"type": "longrope"}, "original_max_position_embeddings": 512}, 512),
        (2048, {"rope_scaling": LONG | {"type": "su", "original_max_position_embeddings": 512}}, 512),
        (2048, {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 2048),
        (2048, {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 2048),
        (512, {"rope_scaling": None}, 512),
        (512, {"rope_scaling": {"type": "yarn", "factor": "4"}}, 512),
        (512, {"rope_scaling": {"type": "linear", "factor": float("inf")}}, 512),
        (512, {"rope_scaling": {"type": "linear", "factor": 0.5}}, 512),
        (512, {"rope_scaling": "yarn"}, 512),
    ],
)
def test_the_context_of_a_configuration(positions: int, more: dict[str, Any], context: int) -> None:
    assert context_of({"model_type": "qwen2", "max_position_embeddings": positions} | more) == context


def test_other_names_of_the_positions_and_none_at_all() -> None:
    assert context_of({"n_positions": 1024}) == 1024
    assert context_of({"max_position_embeddings": None, "n_ctx": 256}) == 256
    assert context_of({"max_position_embeddings": True, "rope_scaling": YARN}) is None


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Qwen2Config, {"max_position_embeddings": 512, "rope_parameters": {**YARN, "rope_theta": 1e6}}),
        (LlamaConfig, {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
        (LlamaConfig, {"max_position_embeddings": 4096, "rope_parameters": LLAMA3}),
        (Gemma3TextConfig, {"max_position_embeddings": 4096}),
    ],
)
def test_the_router_and_the_worker_have_one_context(kind: type[Any], more: dict[str, Any], tmp_path: Path) -> None:
    """The worker reads its configuration through transformers, the router and the checks of a start read the file."""
    kind(**more).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((checkpoint("llama") / "tokenizer.json").read_bytes())
    expected = context_of(config)
    found = {
        "facts": CheckpointFacts(tmp_path).context,
        "router": read_checkpoint(tmp_path).max_model_len,
        "worker": context_limit(AutoConfig.from_pretrained(tmp_path)),
    }
    assert found == dict.fromkeys(found, expected)


def test_a_text_model_in_another_has_the_positions_of_its_own_rope(tmp_path: Path) -> None:
    text = {"model_type": "qwen2", "vocab_size": 64, "max_position_embeddings": 512, "rope_scaling": YARN}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    (tmp_path / "tokenizer.json").write_bytes((checkpoint("llama") / "tokenizer.json").read_bytes())
    assert (CheckpointFacts(tmp_path).context, read_checkpoint(tmp_path).max_model_len) == (2048, 2048)


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba"])
def test_a_model_of_which_no_layer_attends_runs_any_length(kind: str) -> None:
    """Router and worker agree, for no configuration names a number."""
    folder = checkpoint(kind)
    found = read_checkpoint(folder).max_model_len, CheckpointFacts(folder).context
    assert {*found, context_limit(AutoConfig.from_pretrained(folder))} == {MOST_OF_STATES}
    assert not runs_any_length({"model_type": kind, "max_position_embeddings": 512})
    assert context_of({"model_type": kind, "max_position_embeddings": 512}) == 512
    assert not runs_any_length({"model_type": "llama"})


@pytest.mark.parametrize(
    ("named", "served"),
    [(2048, 2048), (MOST_OF_STATES, MOST_OF_STATES), (MOST_OF_STATES + 1, USUAL_OF_STATES)]
    + [(each, USUAL_OF_STATES) for each in (10**30, 1e30, 0, True, "512", None)],
)
def test_its_usual_length_is_what_the_tokenizer_names_if_that_is_real(named: Any, served: int, tmp_path: Path) -> None:
    assert usual_of_states({"model_max_length": named}) == served
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    facts = CheckpointFacts(tmp_path)
    assert facts.usual_len(tmp_path) == USUAL_OF_STATES
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": named}))
    assert facts.usual_len(tmp_path) == served
    assert CheckpointFacts(checkpoint("llama")).usual_len(tmp_path) is None
