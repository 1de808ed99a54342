"""Files of checkpoints as strangers have them: each mistake has words that say what is wrong and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from common.checkpoint.files import INDEX, read_config, weight_bytes, weight_files, weight_problems
from common.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.contracts.errors import InvalidConfig
from tests.support.stranger_files import POINTER, safetensors


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            POINTER,
            "config.json in {0} is a Git LFS pointer of a few lines, not the file itself; run `git lfs pull` in {0}",
        ),
        (
            b'{"model_type": ',
            (
                "{0}/config.json is not valid JSON: Expecting value: line 1 column 16 (char 15); correct it, or"
                " download the"
                " file again"
            ),
        ),
        (b"[1]", "{0}/config.json holds a list; expected a JSON object: download the file again"),
        (b"\xff\xfe{}", "{0}/config.json is not text in UTF-8; expected JSON: download the file again"),
    ],
    ids=["pointer", "comma", "list", "encoding"],
)
def test_a_broken_configuration_is_named_with_what_to_do(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for read in (read_config, model_fingerprint):
        with pytest.raises(InvalidConfig) as caught:
            read(tmp_path)
        (found,) = caught.value.violations
        assert (found.field, found.description) == ("--model", words.format(tmp_path))


def index_of(*names: str) -> Callable[[Path], None]:
    content = {"weight_map": {f"layer.{place}": name for place, name in enumerate(names)}}

    def make(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps(content))

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda folder: None,
            (
                "no weights in {0}; expected *.safetensors: finish the download (--load-format dummy runs on random"
                " weights)"
            ),
        ),
        (
            lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
            (
                "no *.safetensors in {0}, and pytorch_model.bin is not read; convert by transformers'"
                " AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
            ),
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(POINTER),
            (
                "model.safetensors in {0} is a Git LFS pointer of a few lines, not the file itself; run `git lfs"
                " pull` in"
                " {0}"
            ),
        ),
        (
            index_of("a.safetensors", "b.safetensors"),
            (
                "{0}/model.safetensors.index.json names a.safetensors, b.safetensors, which are not there;"
                " finish the download"
            ),
        ),
        (
            lambda folder: safetensors(folder / "model.safetensors", missing=3),
            "{0}/model.safetensors has 79 bytes, and its header promises 82; finish the download",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>not found</html>"),
            "{0}/model.safetensors is not a safetensors file: its header cannot be read; download the file again",
        ),
    ],
    ids=["none", "pickle", "pointer", "index", "short", "html"],
)
def test_weights_that_cannot_be_read_are_found_by_their_files(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    make(tmp_path)
    (found,) = weight_problems(tmp_path)
    assert (found.field, found.description) == ("--model", words.format(tmp_path))


@pytest.mark.parametrize(
    ("there", "named", "read", "unread"),
    [
        (("model.safetensors",), ("a.safetensors",), ("model.safetensors",), "names a.safetensors instead"),
        (
            ("model.safetensors", "a.safetensors", "b.safetensors"),
            ("a.safetensors", "b.safetensors"),
            ("model.safetensors",),
            "names a.safetensors, b.safetensors instead",
        ),
        (("model.safetensors",), ("model.safetensors",), ("model.safetensors",), ""),
        (
            ("model.safetensors", "b.safetensors"),
            ("model.safetensors", "b.safetensors"),
            ("b.safetensors", "model.safetensors"),
            "",
        ),
        (("a.safetensors", "b.safetensors"), ("a.safetensors",), ("a.safetensors",), ""),
        (("a.safetensors", "b.safetensors"), (), ("a.safetensors", "b.safetensors"), ""),
    ],
    ids=["stale", "both", "the-whole", "whole-among-others", "others", "no-index"],
)
def test_the_files_that_are_read(
    there: Sequence[str], named: Sequence[str], read: Sequence[str], unread: str, tmp_path: Path
) -> None:
    for name in there:
        safetensors(tmp_path / name)
    if named:
        index_of(*named)(tmp_path)
    found = weight_files(tmp_path)
    assert [path.name for path in found.paths] == list(read)
    assert unread in found.unread
    assert bool(found.unread) == bool(unread)
    assert weight_problems(tmp_path) == []
    assert weight_bytes(tmp_path) == len(read) * (tmp_path / there[0]).stat().st_size


@pytest.mark.parametrize("content", [b"{", b"{}", POINTER])
def test_an_index_that_cannot_be_read_does_not_matter_beside_a_whole_file(content: bytes, tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_bytes(content)
    assert weight_problems(tmp_path) == []
    assert "cannot be read" in weight_files(tmp_path).unread


@pytest.mark.parametrize("name", ["/a.safetensors", "../a.safetensors"])
def test_an_index_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    index_of(name)(tmp_path)
    (found,) = weight_problems(tmp_path)
    assert found.description == f"{tmp_path / INDEX} names {name}; expected files in {tmp_path}"


def test_whole_weights_are_no_problem(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors")
    assert weight_problems(tmp_path) == []


def test_pointers_have_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    for fingerprint in (model_fingerprint, tokenizer_fingerprint):
        with pytest.raises(InvalidConfig, match="is a Git LFS pointer"):
            fingerprint(tmp_path)
