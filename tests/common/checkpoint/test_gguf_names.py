"""What a model's name stands for: a GGUF file, a folder with one, a packaged model; and the folder that is made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from gguf import GGUFWriter

from common.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.checkpoint.gguf import names
from common.checkpoint.gguf.names import gguf_file, served_folder, served_name
from common.checkpoint.hub import checkpoint_directory, is_hub_name
from common.contracts.errors import InvalidConfig
from tests.support.gguf_files import write_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write_model(folder / "Tiny-Llama.Q4_0.gguf", kind="Q4_0")


def reason(model: object) -> str:
    with pytest.raises(InvalidConfig) as caught:
        checkpoint_directory(str(model))
    return str(caught.value)


def test_a_file_and_a_folder_with_it_are_the_same_model(file: Path, cache: Path) -> None:
    folder = served_folder(file)
    assert served_folder(file.parent) == folder == checkpoint_directory(str(file))
    assert folder.parent == cache
    assert served_folder(folder) == folder
    assert (folder / "model.gguf").resolve() == file
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert (served_name(file), served_name(file.parent)) == ("Tiny-Llama.Q4_0",) * 2
    assert not is_hub_name(str(file))
    assert os.listdir(cache) == [folder.name]


def test_a_name_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    assert served_folder(tmp_path) == tmp_path
    assert served_folder(Path("owner/model")) == Path("owner/model")
    assert served_name(tmp_path / "checkpoint") == "checkpoint"
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.gguf").touch()
    assert served_folder(tmp_path) == tmp_path


def test_a_file_without_the_suffix_is_known_by_its_first_bytes(file: Path) -> None:
    blob = file.rename(file.with_name("sha256-0123"))
    assert gguf_file(str(blob)) == blob
    assert "is a file; expected a GGUF file, or a folder" in reason(__file__)


def test_a_file_that_is_not_there_and_several_files_are_named(file: Path, tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent.gguf'}: no such file" in reason(tmp_path / "absent.gguf")
    shutil.copy(file, file.with_name("other.gguf"))
    said = reason(file.parent)
    assert "has 2 GGUF files, of which one must be named: Tiny-Llama.Q4_0.gguf, other.gguf" in said


def test_a_changed_file_gets_another_folder(file: Path) -> None:
    before = served_folder(file)
    write_model(file, kind="Q8_0")
    after = served_folder(file)
    assert before != after
    assert model_fingerprint(before) != "" != model_fingerprint(after)
    assert "Q8_0" in (after / "gguf_tensors.json").read_text()


def test_equal_files_have_equal_fingerprints_wherever_they_lie(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    other = write_model(tmp_path / "other.gguf", kind="Q4_1")
    folders = [served_folder(each) for each in (file, copy, other)]
    same, equal, different = map(model_fingerprint, folders)
    assert same == equal != different
    assert tokenizer_fingerprint(folders[0]) == tokenizer_fingerprint(folders[1]) != "none"


def test_where_the_cache_cannot_be_written_the_folder_lasts_as_long_as_the_process(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    folder = served_folder(file)
    assert tmp_path not in folder.parents
    assert (folder / "config.json").is_file()


def test_a_packaged_model_that_is_absent_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names._PACKAGED, "tinymodel", ("no-such-package", "make tinymodel"))
    said = reason("tinymodel")
    assert "the package no-such-package, which holds this model, is not installed here; run: make tinymodel" in said
    assert not is_hub_name("tinymodel")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution that holds a GGUF file, and whose module must not be imported."""
    site = tmp_path / "site"
    module, info = site / "holder", site / "holder-1.0.dist-info"
    for folder in (module, info):
        folder.mkdir(parents=True)
    (module / "__init__.py").write_text("raise ImportError('llama.cpp is not here')")
    file = write_model(module / "Held.Q8_0.gguf", kind="Q8_0")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: holder\nVersion: 1.0\n")
    (info / "RECORD").write_text("holder/__init__.py,,\nholder/Held.Q8_0.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(names._PACKAGED, "held", ("holder", "make held"))
    return file


def test_a_packaged_model_is_found_without_importing_its_package(package: Path) -> None:
    assert gguf_file("held") == package
    assert served_name(Path("held")) == "held"
    assert (served_folder(Path("held")) / "model.gguf").resolve() == package


def test_a_broken_file_is_refused_with_its_path(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])
    assert f"{file}: the file is broken or was cut short" in reason(file)


def test_metadata_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    def wrong(writer: GGUFWriter) -> None:
        writer.add_uint32("tokenizer.ggml.merges", 7)

    said = reason(write_model(tmp_path / "m.gguf", facts=wrong))
    assert "its metadata do not make a model" in said


def test_a_folder_that_this_user_may_not_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)  # permissions hold for others alone
    try:
        words = reason(folder)
    finally:
        os.seteuid(user)
    assert f"{folder}: cannot be read by this user" in words
    assert "chmod" in words
