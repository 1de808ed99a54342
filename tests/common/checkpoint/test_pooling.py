"""The pooling of a pool: from a folder of sentence-transformers, in its older and newer form, or from an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.pooling import Pooling, PoolingMode, asked_pooling, name_of, needs_every_token, stored_pooling
from common.contracts.errors import InvalidConfig

LAST, MEAN = PoolingMode.LAST, PoolingMode.MEAN
PARTS = ("Transformer", "Pooling", "Normalize")


def folder(path: Path, config: dict[str, Any], parts: tuple[str, ...] = PARTS, package: str = "models") -> Path:
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{part}" if index else "", "type": f"{package}.{part}"}
        for index, part in enumerate(parts)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "parts", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, PARTS, Pooling(LAST)),
        ({"pooling_mode_mean_tokens": True}, PARTS[:2], Pooling(MEAN, normalised=False)),
        ({"pooling_mode": "mean", "include_prompt": True}, PARTS, Pooling(MEAN)),
        ({"pooling_mode": ["lasttoken"]}, PARTS[:2], Pooling(LAST, normalised=False)),
    ],
)
def test_a_stored_head_is_read(
    tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...], expected: Pooling
) -> None:
    assert stored_pooling(folder(tmp_path, config, parts)) == expected


def test_a_decoder_that_ranks_by_its_answer_generates(tmp_path: Path) -> None:
    assert stored_pooling(folder(tmp_path, {}, ("Transformer", "LogitScore"))) is None


def test_the_class_of_a_part_may_lie_in_any_module(tmp_path: Path) -> None:
    package = "sentence_transformers.sentence_transformer.modules.pooling"
    assert stored_pooling(folder(tmp_path, {"pooling_mode": "mean"}, package=package)) == Pooling(MEAN)


@pytest.mark.parametrize(
    ("config", "parts", "words"),
    [
        ({"pooling_mode_cls_token": True}, PARTS, "pools by cls; expected one of lasttoken and mean"),
        ({"pooling_mode": ["mean", "max"]}, PARTS, "pools by mean and max"),
        ({}, PARTS, "pools by nothing"),
        ({"pooling_mode": "mean", "include_prompt": False}, PARTS, "include_prompt"),
        ({"pooling_mode": "mean"}, (*PARTS[:2], "Dense"), "the parts Transformer, Pooling, Dense"),
        ({"pooling_mode": "mean"}, ("Transformer",), "the parts Transformer;"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_what_to_do(
    tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InvalidConfig, match="--model") as refused:
        stored_pooling(folder(tmp_path, config, parts))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [("config_sentence_transformers.json", "default_prompt_name"), ("sentence_bert_config.json", "do_lower_case")],
)
def test_a_checkpoint_that_changes_texts_is_refused_unless_an_option_asks(tmp_path: Path, name: str, key: str) -> None:
    made = folder(tmp_path, {"pooling_mode": "mean"})
    (made / name).write_text(json.dumps({key: None, "prompts": {"query": ""}}))
    assert stored_pooling(made) == Pooling(MEAN)
    (made / name).write_text(json.dumps({key: "query"}))
    with pytest.raises(InvalidConfig, match=f"{key}.*--pooling last or mean, as modules.json has it"):
        stored_pooling(made)
    assert asked_pooling("mean", made) == Pooling(MEAN)


def test_a_broken_list_of_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"idx": 0}')
    with pytest.raises(InvalidConfig, match="list of JSON objects"):
        stored_pooling(tmp_path)


def test_an_option_goes_before_the_folder(tmp_path: Path) -> None:
    assert asked_pooling("auto", tmp_path) is None
    made = folder(tmp_path, {"pooling_mode": "mean"}, PARTS[:2])
    assert asked_pooling("auto", made) == Pooling(MEAN, normalised=False)
    assert asked_pooling("last", made) == Pooling(LAST, normalised=True)
    assert asked_pooling("none", made) is None


def test_an_option_replaces_a_head_that_cannot_be_computed(tmp_path: Path) -> None:
    made = folder(tmp_path, {"pooling_mode": "max"}, (*PARTS[:2], "Dense"))
    assert asked_pooling("mean", made) == Pooling(MEAN)


def test_identities_name_the_pooling() -> None:
    assert name_of(None) == "none"
    assert name_of(Pooling(LAST)) == "last, normalised"
    assert name_of(Pooling(MEAN, normalised=False)) == "mean"
    assert list(map(needs_every_token, ("none", "last, normalised", "mean", "mean, normalised"))) == [
        False,
        False,
        True,
        True,
    ]
