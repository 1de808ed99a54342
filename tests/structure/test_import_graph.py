"""The shape of the packages: no cycle between rooms or modules, and no new file at a package's top."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.structure.import_graph import PACKAGES, Shape, cycles, longest_path, shape_of

ROOT = Path(__file__).resolve().parents[2]

# A file belongs into the folder of its noun. To add one here, say in ARCHITECTURE.md why no folder fits.
LOOSE = {
    "router": {"__main__", "config", "draining", "from_settings", "main"},
    "kvmanager": {"__main__", "config", "main"},
    "gpuworker": {"__main__", "config", "main", "serial_thread"},
    "common": {
        "backoff",
        "constraint_grammar",
        "cpu_list",
        "own_thread",
        "service",
        "version",
    },
    "cli": {"client", "client_config", "config", "main", "plots"},
}


def test_a_cycle_is_found_and_counts_as_one_room_of_a_path() -> None:
    graph = {"main": {"a"}, "a": {"b"}, "b": {"a", "leaf"}, "leaf": set[str]()}
    assert cycles(graph) == (("a", "b"),)
    assert longest_path(graph) == 3


def test_a_file_that_imports_upward_is_found(tmp_path: Path) -> None:
    package = tmp_path / "router"
    for name, text in {"main": "from router.placement.a import A", "placement/a": "from router import main"}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert shape_of(tmp_path, "router").cycles == (("main", "placement"),)


@functools.cache
def shape_here(package: str) -> Shape:
    """Return the shape of a package of this repository: all its files are parsed, once."""
    return shape_of(ROOT, package)


@pytest.fixture(params=PACKAGES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return shape_here(request.param)


def test_no_rooms_of_a_package_import_each_other(shape: Shape) -> None:
    assert shape.cycles == ()


def test_no_modules_of_a_package_import_each_other(shape: Shape) -> None:
    assert shape.module_cycles == ()


@pytest.mark.parametrize("package", LOOSE)
def test_no_file_stands_loose_that_is_not_named_here(package: str) -> None:
    assert set(shape_here(package).loose) <= LOOSE[package]
