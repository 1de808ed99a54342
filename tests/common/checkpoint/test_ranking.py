"""The two tokens by which a decoder ranks, as sentence-transformers stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.ranking import RankTokens, stored_ranking
from common.contracts.errors import InvalidConfig

PARTS = ("Transformer", "LogitScore")


def folder(path: Path, config: dict[str, Any], parts: tuple[str, ...] = PARTS) -> Path:
    package = "sentence_transformers.cross_encoder.modules.logit_score"
    modules = [
        {"path": f"{index}_{part}" if index else "", "type": f"{package}.{part}"} for index, part in enumerate(parts)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    return path


def test_both_tokens_are_read(tmp_path: Path) -> None:
    made = folder(tmp_path, {"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"})
    assert stored_ranking(made, 151_669) == RankTokens(yes=9693, no=2152)


def test_other_folders_do_not_rank(tmp_path: Path) -> None:
    assert stored_ranking(tmp_path, 100) is None
    assert stored_ranking(folder(tmp_path, {}, ("Transformer", "Pooling")), 100) is None


def test_one_token_alone_has_no_probability(tmp_path: Path) -> None:
    assert stored_ranking(folder(tmp_path, {"true_token_id": 5, "false_token_id": None}), 100) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"false_token_id": 1}, "true_token_id None"),
        ({"true_token_id": "yes", "false_token_id": 1}, "true_token_id 'yes'"),
        ({"true_token_id": 1, "false_token_id": 100}, "false_token_id 100, as modules.json wants it; expected a token"),
        ({"true_token_id": -1, "false_token_id": 1}, "true_token_id -1"),
        ({"true_token_id": True, "false_token_id": 1}, "true_token_id True"),
    ],
)
def test_what_is_no_token_is_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        stored_ranking(folder(tmp_path, config), 100)
