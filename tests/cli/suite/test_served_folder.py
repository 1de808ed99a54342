"""Which folder `quire serve` serves: that of a name of the hub, or the one that stands for a GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.suite.preflight import suite_options
from tests.support.gguf_files import write_model
from tests.support.preflight import file_with, refusals, resolve


def test_a_hub_name_is_resolved_once_and_keeps_its_name(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "hub" / "models--quire--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, home / "snapshots" / ("0" * 40))
    done = resolve("quire/tiny", tmp_path, HF_HUB_OFFLINE="1")
    model, router_flags = done.stdout.splitlines()
    assert Path(model) == home / "snapshots" / ("0" * 40)
    assert "--model-name quire/tiny" in router_flags


def test_a_hub_name_that_the_hub_does_not_give_is_refused(tmp_path: Path) -> None:
    done = resolve("quire/no-such-model", tmp_path, HF_HUB_OFFLINE="1")
    assert "InvalidConfig: --model: 'quire/no-such-model' is not a local directory, and the hub did not" in done.stderr


def test_a_gguf_file_is_served_from_the_folder_that_stands_for_it_under_its_own_name(
    tmp_path: Path, base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_model(tmp_path / "Tiny-Llama.Q4_0.gguf", kind="Q4_0")
    for given in (file, tmp_path):
        options = suite_options(("--model", str(given)), base)
        assert (options.model / "config.json").is_file()
        assert options.router_flags[-2:] == ("--model-name", "Tiny-Llama.Q4_0")
        assert str(options.model) in options.manager_flags
    config = file_with(tmp_path, "[router]\nmodel_name = 'mine'\n")
    assert "--model-name" not in suite_options((*config, "--model", str(file)), base).router_flags


def test_a_bad_gguf_file_is_one_of_all_mistakes(tmp_path: Path, base: dict[str, str]) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    said = refusals(("--model", str(tmp_path / "m.gguf"), "--workers", "0"), base)
    assert "the file is broken or was cut short" in said["--model"]
    assert set(said) == {"--model", "--workers"}
    assert "no such file" in refusals(("--model", str(tmp_path / "n.gguf")), base)["--model"]
