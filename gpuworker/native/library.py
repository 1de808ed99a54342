"""Loads the native library of CPU kernels (gpuworker/native), or says why that failed.

The library shares torch's OpenMP pool: two pools on the same cores stall each other. The build makes one library for
each level of vector instructions. The loader takes the best one that this processor can run, or the one that
`use_level` names. Every call into the library releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import types
from pathlib import Path

import torch  # noqa: F401 - brings the OpenMP library that ours resolves against

from gpuworker.native.build import library
from gpuworker.native.levels import BUILD, levels_here, why_not

__all__ = ["ABI_VERSION", "NativeUnavailable", "best", "level_of", "levels_here", "load", "use_level"]

ABI_VERSION = 21
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")
_log = logging.getLogger(__name__)
_asked = types.SimpleNamespace(level="auto")


class NativeUnavailable(Exception):
    """The library cannot be used here; the text says why."""


def use_level(level: str) -> None:
    """Make `best` return the library of a level, or with "auto" that of the best one. Raises NativeUnavailable."""
    if level != "auto" and (reason := why_not(level)) is not None:
        raise NativeUnavailable(f"level {level}: {reason}")
    _asked.level = level
    best.cache_clear()


@functools.cache
def best() -> ctypes.CDLL | None:
    """Return the library of the best level that this processor runs, or of the level that `use_level` named.

    None, with a log line, when there is none.
    """
    level = levels_here()[-1] if _asked.level == "auto" else _asked.level
    try:
        loaded = load(level)
    except NativeUnavailable as reason:
        _log.warning("no native CPU kernels, so the torch ones run, which are several times slower: %s", reason)
        return None
    _log.info("native CPU kernels: %s", level)
    return loaded


@functools.cache
def load(level: str) -> ctypes.CDLL:
    """Return the library of one level. Raises NativeUnavailable."""
    path = library(level)
    if reason := why_not(level):
        raise NativeUnavailable(reason)
    _share_openmp()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(str(error)) from error
    version = int(loaded.quire_abi_version())
    if version != ABI_VERSION:
        raise NativeUnavailable(f"{path.name} has interface {version}, not {ABI_VERSION}; run {BUILD}")
    return loaded


def level_of(loaded: ctypes.CDLL) -> str:
    """Return the level of a loaded library."""
    return next(level for level in levels_here() if str(library(level)) == loaded._name)


def _share_openmp() -> None:
    """Make the symbols of the OpenMP library that this process has loaded visible to ours."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    found = next((path for path in paths if Path(path).name.startswith(_OPENMP_NAMES)), None)
    if found is None:
        raise NativeUnavailable("torch brought no OpenMP library")
    ctypes.CDLL(found, ctypes.RTLD_GLOBAL)
