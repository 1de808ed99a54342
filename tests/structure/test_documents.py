"""The documents: their lengths, their links, the paths that they name, and the form of a decision."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
COLUMNS = 100
# A path in backticks that begins with one of these is a path from the root of the repository.
PRODUCT = ("cli", "common", "gpuworker", "kvmanager", "router")
TOPS = "bench|cli|common|docker|docs|gpuworker|kvmanager|protos|router|tests"


def documents() -> list[Path]:
    """Return the Markdown files of the repository; node_modules holds those of others."""
    found = [*ROOT.glob("*.md"), *(path for top in TOPS.split("|") for path in (ROOT / top).rglob("*.md"))]
    return sorted(path for path in found if "node_modules" not in path.parts)


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


def of_each(look: Callable[[Path], list[str]], paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return what a look finds wrong, by the name of the file; a file that has nothing wrong is left out."""
    return {path.relative_to(ROOT).as_posix(): found for path in paths if (found := look(path))}


def test_links_lead_somewhere() -> None:
    assert of_each(dead_links, DOCUMENTS) == {}


def test_paths_that_a_document_names_exist() -> None:
    def gone(document: Path) -> list[str]:
        named = set(re.findall(rf"`((?:{TOPS})/[\w./-]*)`", document.read_text()))
        return sorted(path for path in named if not (ROOT / path).exists())

    assert of_each(gone, DOCUMENTS) == {}


def test_files_that_a_docstring_or_a_comment_names_exist() -> None:
    """By their names or the ends of their paths; benchmarks and tests also name files of others."""
    sources = [path for top in PRODUCT for path in (ROOT / top).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    files = {path.as_posix() for path in [*sources, *DOCUMENTS, *(ROOT / "protos" / "quire").rglob("*.py")]}

    def gone(source: Path) -> list[str]:
        named = set(re.findall(r"`([\w/]+\.(?:py|md|cpp|h))`", source.read_text()))
        return sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files))

    assert of_each(gone, sources) == {}


def test_prose_is_wrapped() -> None:
    def long_lines(document: Path) -> list[str]:
        return [line for line in prose(document.read_text()) if len(line) > COLUMNS]

    assert of_each(long_lines, DOCUMENTS) == {}


def faults_of_a_decision(page: Path, index: str) -> list[str]:
    """Return which of the form's parts a decision lacks."""
    text = page.read_text()
    number, _, title = headings(text)[0].partition(". ")
    row = f"| {number} | [{title}](docs/decisions/{page.name}) |"
    right = {
        "its title begins with the number of its file": page.name.startswith(f"{number}-"),
        "its parts": headings(text)[1:] == ["Context", "Choice", "Rejected", "Evidence"],
        "a line with its date": re.search(r"^20\d\d-\d\d-\d\d$", text, re.MULTILINE) is not None,
        f"in DECISIONS.md: {row}": row in index,
    }
    return [part for part, is_right in right.items() if not is_right]


def test_what_a_decision_lacks_is_found(tmp_path: Path) -> None:
    page = tmp_path / "0007-a-title.md"
    page.write_text("# 0008. A title\n\nin June\n\n## Context\n")
    row = "in DECISIONS.md: | 0008 | [A title](docs/decisions/0007-a-title.md) |"
    others = ["its title begins with the number of its file", "its parts", "a line with its date"]
    assert faults_of_a_decision(page, "") == [*others, row]


def test_a_decision_has_its_parts_and_stands_in_the_index() -> None:
    index = (ROOT / "DECISIONS.md").read_text()
    assert of_each(lambda page: faults_of_a_decision(page, index), DECISIONS) == {}


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
