"""A configuration that leaves out defaults: what it is completed with, and that transformers agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.completed import completed
from gpuworker.plane.checkpoint_facts import CheckpointFacts, eos_token_ids
from router.answers.text.checkpoint import read_checkpoint

GEMMA3 = {"model_type": "gemma3", "text_config": {"hidden_size": 64}}


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_text_config_gets_the_defaults_of_its_kind() -> None:
    text = completed(GEMMA3)["text_config"]
    assert (text["vocab_size"], text["max_position_embeddings"], text["hidden_size"]) == (262208, 131072, 64)


def test_a_text_config_that_is_missing_or_null_is_all_defaults() -> None:
    for config in ({"model_type": "gemma3"}, {"model_type": "gemma3", "text_config": None}):
        assert completed(config)["text_config"]["vocab_size"] == 262208


def test_what_the_file_says_wins_and_null_is_said() -> None:
    found = completed({"model_type": "llama", "vocab_size": 7, "eos_token_id": None})
    assert (found["vocab_size"], found["eos_token_id"], found["max_position_embeddings"]) == (7, None, 2048)


@pytest.mark.parametrize("config", [{}, {"model_type": "no_such_kind"}, {"text_config": {"vocab_size": 5}}])
def test_an_unknown_kind_stays_as_it_is(config: dict[str, Any]) -> None:
    assert completed(config) == config


def test_router_and_worker_read_a_checkpoint_that_omits_defaults(tmp_path: Path) -> None:
    facts = read_checkpoint(written(tmp_path, GEMMA3))
    assert (facts.max_model_len, facts.vocab_size, facts.eos_token_ids) == (131072, 262208, (1,))
    assert (CheckpointFacts(tmp_path).context, CheckpointFacts(tmp_path).vocab_size) == (131072, 262208)
    assert eos_token_ids(tmp_path) == (1,)


def test_ends_at_the_top_come_before_those_of_the_text_model(tmp_path: Path) -> None:
    written(tmp_path, GEMMA3 | {"eos_token_id": [1, 106]})
    assert eos_token_ids(tmp_path) == read_checkpoint(tmp_path).eos_token_ids == (1, 106)
