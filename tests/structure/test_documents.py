"""The documents: their lengths, their links, the paths that they name, and the form of a decision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
COLUMNS = 100
MOST_LINES = {"README.md": 120, "ARCHITECTURE.md": 100}
# A path in backticks that begins with one of these is a path from the root of the repository.
TOPS = "bench|cli|common|docker|docs|gpuworker|kvmanager|protos|router|tests"


def documents() -> list[str]:
    """Return the Markdown files of the repository; node_modules holds those of others."""
    found = [*ROOT.glob("*.md"), *(path for top in TOPS.split("|") for path in (ROOT / top).rglob("*.md"))]
    names = (path.relative_to(ROOT).as_posix() for path in found)
    return sorted(name for name in names if "node_modules" not in name)


DOCUMENTS = documents()


def prose(text: str) -> Iterator[str]:
    """Yield the lines that are neither code nor a row of a table."""
    is_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield line


def anchors(text: str) -> set[str]:
    """Return the anchors that headings make: lower case, words joined by hyphens."""
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings(text)}


def headings(text: str) -> list[str]:
    """Return the headings."""
    return [line.lstrip("#").strip() for line in prose(text) if line.startswith("#")]


def dead_links(document: Path) -> list[str]:
    """Return the links that lead to no file, or to no heading of it."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One title\n[a](page.md#one-title) [b](#other) [c](gone.md) ![d](gone.svg) [e](https://x.y)\n")
    assert dead_links(page) == ["#other", "gone.md", "gone.svg"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    assert dead_links(ROOT / name) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_that_a_document_names_exist(name: str) -> None:
    named = set(re.findall(rf"`((?:{TOPS})/[\w./-]*)`", (ROOT / name).read_text()))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_prose_is_wrapped(name: str) -> None:
    assert [line for line in prose((ROOT / name).read_text()) if len(line) > COLUMNS] == []


@pytest.mark.parametrize(("name", "most"), MOST_LINES.items())
def test_what_a_newcomer_reads_first_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem[:4])
def test_a_decision_has_its_parts_and_stands_in_the_index(page: Path) -> None:
    text = page.read_text()
    number, title = headings(text)[0].split(". ", 1)
    assert page.name.startswith(f"{number}-")
    assert headings(text)[1:] == ["Context", "Choice", "Rejected", "Evidence"]
    assert re.search(r"^20\d\d-\d\d-\d\d$", text, re.MULTILINE)
    assert f"| {number} | [{title}](docs/decisions/{page.name}) |" in (ROOT / "DECISIONS.md").read_text()


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
