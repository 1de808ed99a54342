"""A folder whose files and packages have the names of Quire's own and of the standard library's; each import raises."""

from __future__ import annotations

from pathlib import Path

PACKAGES = ("common", "cli", "router", "kvmanager", "gpuworker", "bench")
MODULES = ("numbers", "redis", "torch")


def hostile_folder(folder: Path, packages: tuple[str, ...] = PACKAGES, modules: tuple[str, ...] = MODULES) -> Path:
    """Fill a folder with packages and modules that raise ImportError when they are imported; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in packages:
        (folder / name).mkdir()
    for path in (*(f"{name}/__init__.py" for name in packages), *(f"{name}.py" for name in modules)):
        (folder / path).write_text(f'raise ImportError("{path} of the current folder was imported")\n')
    return folder
