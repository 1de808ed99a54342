"""Builds the native library of the CPU kernels: one shared object for each level of vector instructions.

Called when the package is built or installed (hatch_build.py) and by `python gpuworker/native/build.py`. Uses the
standard library alone: it runs inside an isolated build environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
BUILT = SOURCE / "built"
_COMMON = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
_COMMON += ["-fvisibility=hidden", "-fno-gnu-unique"]
_COMMON += ["-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
_AVX512 = [
    *_AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16")),
    "-mprefer-vector-width=512",
]
# From the plainest to the best; the loader tries them from the end.
LEVELS: dict[str, list[str]] = {"scalar": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS |= {"avx2": _AVX2, "avx512": _AVX512}


class NoCompiler(Exception):
    """There is no C++ compiler, or it cannot compile the library."""


def library(level: str) -> Path:
    """Return the path of a level's library after the build."""
    return BUILT / f"libquire_cpu.{level}.so"


def build(force: bool = False) -> list[Path]:
    """Compile changed files, several at a time; return the libraries, one for each level.

    Raises NoCompiler, with the compiler's message.
    """
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests and installations may come at once
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            units = [(level, path) for level in LEVELS for path in sorted(SOURCE.glob("*.cpp"))]
            compiled = list(pool.map(lambda unit: _compile(unit[0], unit[1], force), units))
            missing = not all(library(level).is_file() for level in LEVELS)
            if any(compiled) or missing:
                list(pool.map(_link, LEVELS))
    return [library(level) for level in LEVELS]


def _fingerprint(source: Path, command: list[str]) -> str:
    """Return a digest of an object's inputs: its source, all headers, and the command."""
    digest = hashlib.sha256(shlex.join(command).encode())
    for path in [source, *sorted(SOURCE.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoCompiler("no C++ compiler on PATH (tried c++, g++, clang++); set CXX")


def _object(level: str, path: Path) -> Path:
    return BUILT / f"{path.stem}.{level}.o"


def _compile(level: str, source: Path, force: bool) -> bool:
    """Compile one file for one level unless that is done; return whether it was to be done."""
    made = _object(level, source)
    command = [*_compiler(), *_COMMON, *LEVELS[level], "-c", str(source), "-o", str(made)]
    stamp, wanted = made.with_suffix(".stamp"), _fingerprint(source, command)
    if not force and made.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return False
    stamp.unlink(missing_ok=True)
    _run(command)
    stamp.write_text(wanted)
    return True


def _link(level: str) -> None:
    objects = [str(_object(level, path)) for path in sorted(SOURCE.glob("*.cpp"))]
    # Without -fopenmp: the library takes the OpenMP that torch has loaded, not a second one.
    fresh = library(level).with_suffix(".new")
    _run([*_compiler(), "-shared", *objects, "-o", str(fresh)])
    fresh.replace(library(level))  # a process that has the old one mapped keeps it


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"{shlex.join(command)} failed:\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    for built in build(force="--force" in sys.argv):
        print(built)  # noqa: T201
