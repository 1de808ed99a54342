"""Loads the native library of CPU kernels (gpuworker/native), or says why that failed.

The library shares torch's OpenMP pool: two pools on the same cores stall each other. The build makes one library for
each level of vector instructions. The loader takes the best one that this processor can run, and every call into it
releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch  # noqa: F401 - brings the OpenMP library that ours resolves against

from gpuworker.native.build import LEVELS, library

ABI_VERSION = 2
_NEEDS = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}),
}
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")
_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The library cannot be used here; the text says why."""


@functools.cache
def best() -> ctypes.CDLL | None:
    """Return the library of the best level that this processor runs; None, with a log line, when there is none."""
    try:
        level = levels_here()[-1]
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
    if not path.is_file():
        raise NativeUnavailable(f"{path.name} was not built (is there a C++ compiler? run `make install`)")
    _share_openmp()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(str(error)) from error
    version = int(loaded.quire_abi_version())
    if version != ABI_VERSION:
        raise NativeUnavailable(f"{path.name} has interface {version}, not {ABI_VERSION}; run `make install`")
    return loaded


@functools.cache
def levels_here() -> tuple[str, ...]:
    """Return the levels that this processor can run, from the plainest to the best."""
    flags = _processor_flags()
    return tuple(level for level in LEVELS if _NEEDS[level] <= flags)


def level_of(loaded: ctypes.CDLL) -> str:
    """Return the level of a loaded library."""
    return next(level for level in reversed(levels_here()) if load(level) is loaded)


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _share_openmp() -> None:
    """Make the symbols of the OpenMP library that this process has loaded visible to ours."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    found = next((path for path in paths if Path(path).name.startswith(_OPENMP_NAMES)), None)
    if found is None:
        raise NativeUnavailable("torch brought no OpenMP library")
    ctypes.CDLL(found, ctypes.RTLD_GLOBAL)
