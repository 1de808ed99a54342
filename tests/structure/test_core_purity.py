"""The pure cores import the standard library and a few modules of common, nothing else: checked on the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_COMMON = {
    "common.types",
    "common.hashing",
    "common.json_schema",
    "common.lease",
    "common.clock",
    "common.errors",
    "common.limits",
    "common.turns",
}
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
CORES = ("router", "kvmanager", "gpuworker")
PURE_FILES = sorted(path for service in CORES for path in (ROOT / service / "core").rglob("*.py"))
PURE_FILES += sorted((ROOT / "common/decisions/disk/core").rglob("*.py"))


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


def is_pure(module: str, service: str) -> bool:
    """Return whether a core of `service` may import `module`."""
    if module in ALLOWED_COMMON or module == f"{service}.core" or module.startswith(f"{service}.core."):
        return True
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in FORBIDDEN_STDLIB


def test_a_core_imports_only_the_allow_list() -> None:
    impure = {}
    for path in PURE_FILES:
        service, name = path.relative_to(ROOT).parts[0], path.relative_to(ROOT).as_posix()
        impure[name] = {module for module in imported_modules(path.read_text()) if not is_pure(module, service)}
    assert {name: modules for name, modules in impure.items() if modules} == {}


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
    assert not all(is_pure(name, "router") for name in imported_modules(source))


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("common/errors.py", {"quire.api.errors"}),
        ("common/limits.py", set()),
        ("common/types.py", {"quire.api.types"}),
        ("protos/quire/api/errors.py", set()),
        ("protos/quire/api/types.py", {"quire.api.errors"}),
    ],
)
def test_what_the_cores_share_with_the_client_is_pure(path: str, allowed: set[str]) -> None:
    imported = imported_modules((ROOT / path).read_text())
    assert {name for name in imported if not is_pure(name, "no service")} == allowed


def test_every_service_has_a_core_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in PURE_FILES} == {*CORES, "common"}
