"""The .proto files: which module of buf has them, what they import, and where they say what stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "protos/quire").rglob("*.proto"))
PUBLIC = {"quire.inference.v1", "quire.types.v1", "quire.decision.v1"}
MODULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "buf.yaml").read_text())["modules"]


def within(module: dict[str, Any]) -> set[Path]:
    """Return the files of a module."""
    return {path for path in FILES if any(path.is_relative_to(ROOT / folder) for folder in module["includes"])}


def package_of(path: Path) -> str:
    (package,) = re.findall(r"^package (\S+);$", path.read_text(), re.MULTILINE)
    return str(package)


def test_each_file_is_in_one_module_and_the_one_with_a_name_has_what_clients_call() -> None:
    public, internal = map(within, MODULES)
    assert (public | internal, public & internal) == (set(FILES), set())
    assert {package_of(path) for path in public} == PUBLIC
    assert [module.get("name") for module in MODULES] == ["buf.build/quire-llm/quire", None]


def test_the_public_module_imports_nothing_of_the_other() -> None:
    public = within(MODULES[0])
    for path in public:
        imports = re.findall(r'^import "(quire/[^"]+)";$', path.read_text(), re.MULTILINE)
        assert {ROOT / "protos" / each for each in imports} <= public, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_header_says_where_the_promise_is_and_no_file_names_a_go_package(path: Path) -> None:
    text = path.read_text()
    assert "protos/README.md says what stays" in text.partition("syntax =")[0]
    assert "go_package" not in text


def test_the_promise_names_every_package() -> None:
    promised = (ROOT / "protos/README.md").read_text().partition("## What stays")[2]
    named = set(re.findall(r"`(quire\.\w+\.v\d)`", promised))
    assert named == {".".join(path.relative_to(ROOT / "protos").parts[:3]) for path in FILES}
