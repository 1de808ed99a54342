"""Checkpoints without a tokenizer.json: transformers converts the older files, once, or the error says what to do."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from common.checkpoint import tokenizer_file
from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import InvalidConfig
from router.answers.text.tokenizer import Tokenizer

TEXTS = ("The quick fox, 77.", "  two spaces", "Grüße 😀", "a\nb\tc", "", "<s> hello </s>")
SENTENCES = [f"The quick brown fox jumps over the lazy dog, number {n} and {7 * n}." for n in range(300)]
ELSEWHERE = "Or convert elsewhere, by transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer is a sentencepiece model alone."""
    path, model = tmp_path / "checkpoint", io.BytesIO()
    path.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=300, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    (path / "tokenizer.model").write_bytes(model.getvalue())
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    return path


def the_same_as_transformers(folder: Path) -> None:
    reference, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert ours is not None
    for text in TEXTS:
        for special in (True, False):
            wanted = reference(text, add_special_tokens=special).input_ids
            assert ours._encode(text, special) == wanted, text
    ours.close()


def test_a_sentencepiece_model_is_converted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    the_same_as_transformers(folder)
    monkeypatch.delattr(subprocess, "run")
    kept = tokenizer_json(folder)
    assert kept is not None
    assert not (folder / "tokenizer.json").exists(), "the checkpoint's folder stays as it is"
    assert [path.name for path in kept.parent.iterdir()] == ["tokenizer.json"]


def test_a_vocabulary_with_merges_is_converted(tmp_path: Path) -> None:
    letters = ["<unk>", "l", "o", "w", "e", "r", "Ġ", "lo", "low", "er"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w\ne r\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = tokenizer_json(tmp_path)
    assert found is not None
    assert json.loads(found.read_text())["model"]["vocab"]["low"] == 8


def refusal(folder: Path) -> str:
    with pytest.raises(InvalidConfig) as caught:
        tokenizer_json(folder)
    (found,) = caught.value.violations
    assert found.field == "--model"
    return found.description


@pytest.mark.parametrize(("content", "package"), [(None, "sentencepiece"), (b"IQ== 0\n", "tiktoken")])
def test_a_missing_package_is_named(
    content: bytes | None, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (folder / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(tokenizer_file, "find_spec", lambda name: None if name == package else object())
    assert refusal(folder) == (
        f"{folder} has tokenizer.model and no tokenizer.json, and its conversion needs {package}: pip"
        f" install {package}."
        f" {ELSEWHERE}"
    )


def test_a_model_that_is_broken_is_refused_in_words(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"\n" + b"\xff" * 100)
    said = refusal(folder)
    assert said.startswith(f"{folder} has tokenizer.model and no tokenizer.json, and its conversion failed: ")
    assert said.endswith(ELSEWHERE)
    assert len(said) < 700


def test_a_checkpoint_without_any_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokenizer_json(tmp_path) is None
