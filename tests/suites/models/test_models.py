"""docs/models.md and the table of defaults are what this transformers gives; a few families are tried anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig

from common.checkpoint.completed import DEFAULTS, completed
from tests.suites.models import defaults, matrix, trial
from tests.suites.models.families import entries

DOCUMENT = matrix.DOCUMENT.read_text()
TRIED = [
    "llama",
    "llama, rope dynamic",
    "mistral",
    "mixtral, window",
    "qwen3_moe",
    "qwen3_moe, window",
    "olmoe",
    "lfm2",
    "qwen3_next",
    "qwen3_5_text",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "mimo_v2_flash",
    "deepseek_v3",
    "phimoe",
    "phimoe, window",
    "llama4_text, no chunks",
    "falcon_mamba",
]


def test_the_document_has_each_row_of_the_list_once() -> None:
    named = re.findall(r"^\* `([^`]+)`", DOCUMENT, re.MULTILINE)
    assert sorted(named) == sorted(entry.name for entry in entries())
    assert f"in transformers {transformers.__version__} " in DOCUMENT.replace("\n", " ")


def test_the_document_names_the_models_of_several_media_whose_text_is_served() -> None:
    assert matrix.wrapped() in DOCUMENT


def test_no_family_differs_or_crashes() -> None:
    for way, title, _ in matrix.SECTIONS:
        if way in (trial.DIFFERS, trial.CRASHES):
            assert f"## {title}" not in DOCUMENT


@pytest.mark.parametrize("name", TRIED)
def test_a_family_is_served_as_the_document_says(name: str, tmp_path: Path) -> None:
    entry = next(each for each in entries() if each.name == name)
    outcome = trial.run(entry, tmp_path)
    section = next(title for way, title, _ in matrix.SECTIONS if way == outcome.way)
    assert matrix.line(outcome) in DOCUMENT.partition(f"## {section}\n")[2].partition("\n## ")[0]


def test_the_table_of_defaults_is_that_of_transformers() -> None:
    assert DEFAULTS.read_text() == defaults.text(), "make models-matrix writes it"


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n_text", "gpt2", "llama", "qwen3_5"])
def test_a_completed_configuration_has_the_numbers_of_transformers(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    whole = AutoConfig.from_pretrained(tmp_path).get_text_config()
    ours = completed({"model_type": kind})
    ours |= ours.get("text_config", {})
    assert ours["vocab_size"] == whole.vocab_size
    length = next(ours[name] for name in ("max_position_embeddings", "n_positions") if name in ours)
    assert length == whole.max_position_embeddings
