"""What the contract of purity in pyproject.toml lists imports the standard library and its peers alone, as written."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What of the standard library would bring the outside world in: event loops, sockets, processes, threads, the time.
FORBIDDEN_STDLIB = {
    "asyncio",
    "multiprocessing",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uuid",
}


def pure_modules() -> tuple[str, ...]:
    """Return the packages and files that the contract of purity lists, dotted."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [pure] = (each["source_modules"] for each in contracts if each["name"].startswith("Pure packages and files"))
    return tuple(pure)


PURE = pure_modules()


def files_of(module: str) -> Iterator[Path]:
    """Yield the files of a package, or the file of a module."""
    place = ROOT.joinpath(*module.split("."))
    if place.is_dir():
        yield from sorted(place.rglob("*.py"))
    else:
        yield place.with_suffix(".py")


def imported_modules(source: str) -> set[str]:
    """Return every module that `source` imports, by its full name; a relative import is returned with its dots."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"common.{alias.name}" for alias in node.names} if module == "common" else {module}
    return names


def is_pure(module: str) -> bool:
    """Return whether a pure file may import `module`."""
    if any(module == pure or module.startswith(f"{pure}.") for pure in PURE):
        return True
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in FORBIDDEN_STDLIB


def test_a_pure_file_imports_pure_files_and_the_standard_library() -> None:
    impure = {}
    for path in (path for module in PURE for path in files_of(module)):
        impure[path.relative_to(ROOT).as_posix()] = {
            module for module in imported_modules(path.read_text()) if not is_pure(module)
        }
    assert impure.pop("common/contracts/clock.py") == {"time"}
    client = {"quire.api.errors", "quire.api.types"}
    assert {name: modules - client for name, modules in impure.items() if modules - client} == {}
    assert {name for name, modules in impure.items() if modules & client} == {
        "common/contracts/errors.py",
        "common/contracts/types.py",
    }


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from grpc import aio",
        "from common import rpc",
        "from common.rpc import status",
        "import time",
        "from . import x",
    ],
)
def test_an_impure_import_is_seen(source: str) -> None:
    assert not all(is_pure(name) for name in imported_modules(source))


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("protos/quire/api/errors.py", set()), ("protos/quire/api/types.py", {"quire.api.errors"})],
)
def test_what_the_services_share_with_the_client_is_pure(path: str, allowed: set[str]) -> None:
    imported = imported_modules((ROOT / path).read_text())
    assert {name for name in imported if not is_pure(name)} == allowed


def test_every_service_decides_something() -> None:
    assert {module.partition(".")[0] for module in PURE} == {"common", "router", "kvmanager", "gpuworker"}
