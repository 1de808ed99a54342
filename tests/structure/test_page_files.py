"""The files of the page for operators: no way for a text to become markup or code, and pictures that stay small."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "router" / "api" / "page"
OWN = sorted(
    path for path in (PAGE / "static").rglob("*") if path.suffix in (".js", ".html") and path.parent.name != "vendor"
)
# What makes markup or code of a text, and what the content security policy would refuse.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|new Function|javascript:"
    r"|setAttribute\(\"style|<style|\sstyle=|\son[a-z]+=\"|<script(?![^>]*\ssrc=)|https?://(?!www\.w3\.org/2000/svg)"
)


def test_what_is_forbidden_is_found() -> None:
    for line in (
        "a.innerHTML = b",
        "<p style='x'>",
        '<a onclick="x()">',
        "<script>x()</script>",
        "https://cdn.example/a.js",
    ):
        assert FORBIDDEN.search(line)
    assert not FORBIDDEN.search('<script src="app.js" type="module"></script>')


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_text_becomes_markup(path: Path) -> None:
    assert FORBIDDEN.findall(path.read_text()) == []


def test_the_page_serves_the_version_that_the_lock_names() -> None:
    version = json.loads((PAGE / "npm" / "package-lock.json").read_text())["packages"]["node_modules/uplot"]["version"]
    script = (PAGE / "static" / "vendor" / "uPlot.iife.min.js").read_text()
    assert f"(v{version})" in script[:300]


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "page").glob("*.png")}
    assert len(sizes) == 6
    assert max(sizes.values()) < 300_000
