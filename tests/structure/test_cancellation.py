"""A cancellation is never lost: `asyncio.wait_for` swallows one that meets its end, before Python 3.12."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bench", "cli", "common", "gpuworker", "kvmanager", "protos", "router")


def calls_of_wait_for(source: str) -> list[int]:
    """Return the lines that call `asyncio.wait_for`, under either name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node.value) == "asyncio":
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            found += [node.lineno for each in node.names if each.name == "wait_for"]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_waits_by_wait_for(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / package).rglob("*.py")
        if "wait_for" in (source := path.read_text())
        for line in calls_of_wait_for(source)
    }
    assert not found, "use `async with asyncio.timeout(...)`"


@pytest.mark.parametrize("source", ["import asyncio\nasyncio.wait_for(x, 1)", "\nfrom asyncio import wait_for"])
def test_both_ways_to_call_it_are_found(source: str) -> None:
    assert calls_of_wait_for(source) == [2]


def test_the_wait_of_a_condition_is_another_one() -> None:
    assert not calls_of_wait_for("changed.wait_for(true)")
