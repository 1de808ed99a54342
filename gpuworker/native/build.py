"""Builds the native library of the CPU kernels: one shared object for each level of vector instructions.

Called when the package is built or installed (hatch_build.py), by `python gpuworker/native/build.py` for all levels,
and by `python -m gpuworker.native.levels` for the one that this processor takes. Uses the standard library alone: it
runs inside an isolated build environment.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
# Set by tests.support.sanitized: this level alone is built, and loaded, with checks of every access.
SANITIZED = os.environ.get("NATIVE_SANITIZED", "")
BUILT = SOURCE / ("built_sanitized" if SANITIZED else "built")
_CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1"]
_LINK = _CHECKS if SANITIZED else []
# The standard library of C++, and what newer versions of libgcc add, go into the library: it runs on systems whose own
# are older than the compiler. libgcc_s stays outside, for the unwinding of exceptions belongs to the process.
_SELF_CONTAINED = ["-static-libstdc++", "-lgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]
if SANITIZED:
    _SELF_CONTAINED = []
_COMMON = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
_COMMON += ["-fvisibility=hidden", "-fno-gnu-unique"]
_COMMON += ["-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_COMMON += _LINK
_SAID = 5  # lines of progress, about
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
# Where a processor multiplies and adds at once, the compiler does so in some instances of a template, and bits would
# depend on the batch. Other levels name that instruction.
_SCALAR = ["-ffp-contract=off"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")), "-mprefer-vector-width=512"]
_VNNI = [*_AVX512, "-mavx512vnni"]
_BF16 = [*_VNNI, "-mavx512bf16"]
_X86 = {"avx2": _AVX2, "avx_vnni": [*_AVX2, "-mavxvnni"]}
_X86 |= {"avx512": _AVX512, "avx512_vnni": _VNNI, "avx512_bf16": _BF16}
_X86 |= {"amx": [*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]}
# NEON belongs to every aarch64 processor; the macro tells its level from the scalar one. GCC for ARM brings loads
# forward before it knows what lies in registers. These do not suffice then: most sums of a tile went through memory.
_NEON = ["-DQUIRE_NEON", "-fno-schedule-insns", "-Wno-ignored-optimization-argument"]
_ARM = {"neon": ["-march=armv8-a", *_NEON], "neon_dotprod": ["-march=armv8.2-a+dotprod", *_NEON]}
# By platform.machine().
_LEVELS_OF = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM}


def levels_for(machine: str) -> dict[str, list[str]]:
    """Return a processor's levels, from the plainest to the best, with flags for the compiler."""
    return {"scalar": _SCALAR} | _LEVELS_OF.get(machine.lower(), {})


# The loader tries them from the end.
LEVELS = levels_for(platform.machine())
# A level differs from the one before it by a macro: sources that do not read it are not compiled again.
_BEFORE = {"avx_vnni": ("avx2", "__AVXVNNI__")}
_BEFORE |= {"avx512_vnni": ("avx512", "__AVX512VNNI__"), "avx512_bf16": ("avx512_vnni", "__AVX512BF16__")}
_BEFORE |= {"amx": ("avx512_bf16", "__AMX_TILE__"), "neon_dotprod": ("neon", "__ARM_FEATURE_DOTPROD")}
# What a level takes that older compilers and assemblers lack, and the first GCC that has it. Before, it is left out.
_NEW = {
    "scalar": ("#if defined(__x86_64__)\n_Float16 half(float x) { return x; }\n#endif", 12),
    "avx_vnni": ('void add() { asm("{vex} vpdpwssd %ymm0, %ymm1, %ymm2"); }', 11),
    "avx512_bf16": ('void add() { asm("vdpbf16ps %zmm0, %zmm1, %zmm2"); }', 10),
    "amx": ('void add() { asm("tdpbf16ps %tmm0, %tmm1, %tmm2"); }', 11),
}
# Sources that take longest to compile, the longest first: begun last, one of them would keep a single core busy.
_LONGEST = ("linear_tile", "linear_tile_bf16", "attention_rows", "attention", "attention_tiles")
# What a run of the compiler takes besides, as each run reads headers for half a second. All of it read the same macros.
_BESIDES = {
    "attention": ("experts", "follow", "library", "ranks", "sample", "step_queue", "whole_step"),
    "linear": ("llama",),
    "linear_tile": ("linear_tile_whole",),
}
if SANITIZED:
    _BEFORE = {}
    LEVELS = {SANITIZED: LEVELS[SANITIZED]}


class NoCompiler(Exception):
    """There is no C++ compiler, or it cannot compile the library."""


def library(level: str) -> Path:
    """Return the path of a level's library after the build."""
    return BUILT / f"libquire_cpu.{level}.so"


def build(force: bool = False, progress: bool = False, wanted: Collection[str] | None = None) -> list[Path]:
    """Compile changed files, several at a time; return the libraries of those levels that the compiler can make.

    `wanted`: the levels; None for all.
    With `progress` some lines say how far the build is. A level that the compiler is too old for is left out, with a
    line. What a build that was interrupted has compiled is not compiled again.
    Raises NoCompiler, with the compiler's message.
    """
    wanted = LEVELS if wanted is None else wanted
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests and installations may come at once
        with ThreadPoolExecutor(_cores()) as pool:
            levels = [level for level in wanted if can_make(level)]
            units = dict.fromkeys((_compiled_at(level, path), path) for path in _sources() for level in levels)
            compiled = []
            for done in pool.map(lambda unit: _compile(unit[0], unit[1], force), units):
                compiled.append(done)
                if progress and any(compiled) and len(compiled) % -(-len(units) // _SAID) == 0:
                    print(f"    {len(compiled)} of {len(units)} files compiled", flush=True)  # noqa: T201
            list(pool.map(_link, [level for level in levels if not _is_linked(level)]))
    if missed := [level for level in wanted if level not in levels]:  # by a compiler that makes the others
        line = f"    left out {', '.join(missed)}: {too_old(missed)}"
        print(line, file=sys.stdout if progress else sys.stderr)
    return [library(level) for level in levels]


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sources() -> list[Path]:
    """Return the source that names each run of the compiler, those that take longest first."""
    order = {name: place for place, name in enumerate(_LONGEST)}
    besides = {path for name in _BESIDES for path in _besides(SOURCE / f"{name}.cpp")}
    found = (path for path in SOURCE.glob("*.cpp") if path not in besides)
    return sorted(found, key=lambda path: (order.get(path.stem, len(order)), path))


def _besides(source: Path) -> list[Path]:
    """Return the sources that one run of the compiler takes besides this one."""
    paths = (SOURCE / f"{name}.cpp" for name in _BESIDES.get(source.stem, ()))
    return [path for path in paths if path.is_file()]


def too_old(levels: Collection[str]) -> str:
    """Return that the compiler is too old for these levels, and which one makes them."""
    first = max(_NEW[level][1] for level in levels)
    return f"{compiler()[0]} or its assembler is too old; take GCC {first} or newer"


def may_lack(level: str) -> bool:
    """Return whether some compilers that make the scalar level, or AVX2, cannot make this one."""
    return level in _NEW and level != "scalar"


def can_make(level: str) -> bool:
    """Return whether the compiler can make a level; if it cannot, remove what an earlier one made of it."""
    if level not in _NEW:
        return True
    command = [*compiler(), *LEVELS[level], "-x", "c++", "-c", "-", "-o", os.devnull]
    can = not _tried(command, _NEW[level][0]).returncode
    if not can:
        library(level).unlink(missing_ok=True)
    return can


def _fingerprint(source: Path, command: list[str]) -> str:
    """Return a digest of an object's inputs: its sources, the headers that they include, and the command."""
    digest = hashlib.sha256(shlex.join(command).encode())
    for path in sorted(_read_with(source)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _read_with(source: Path) -> frozenset[Path]:
    """Return what one run of the compiler reads of this folder: its sources, and the headers at any depth."""
    left = [source, *_besides(source)]
    found = set(left)
    while left:
        names = _INCLUDE.findall(left.pop().read_text())
        fresh = {SOURCE / name for name in names} - found
        found |= fresh
        left += fresh
    return frozenset(found)


@functools.cache
def _compiled_at(level: str, source: Path) -> str:
    """Return the level whose object file of a source serves this level too."""
    if level not in _BEFORE:
        return level
    before, macro = _BEFORE[level]
    differs = any(macro in path.read_text() for path in _read_with(source))
    return level if differs else _compiled_at(before, source)


def compiler() -> list[str]:
    """Return the command that compiles. Raises NoCompiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoCompiler("no C++ compiler on PATH (tried c++, g++, clang++); set CXX")


def _object(level: str, path: Path) -> Path:
    return BUILT / f"{path.stem}.{_compiled_at(level, path)}.o"


def _compile(level: str, source: Path, force: bool) -> bool:
    """Run the compiler once for one level unless that is done; return whether it was to be done."""
    made = _object(level, source)
    besides = [word for path in _besides(source) for word in ("-include", str(path))]
    command = [*compiler(), *_COMMON, *LEVELS[level], *besides, "-c", str(source), "-o", str(made)]
    stamp, wanted = made.with_suffix(".stamp"), _fingerprint(source, command)
    if not force and made.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return False
    stamp.unlink(missing_ok=True)
    _run(command)
    stamp.write_text(wanted)
    return True


def _objects(level: str) -> list[Path]:
    return [_object(level, path) for path in sorted(_sources())]


def _is_linked(level: str) -> bool:
    """Return whether the library of a level is newer than its objects, which another level's build may have made."""
    made = library(level)
    stamp = made.with_suffix(".stamp")
    if not (made.is_file() and stamp.is_file() and stamp.read_text() == shlex.join(_linking(level, _SELF_CONTAINED))):
        return False
    return all(each.stat().st_mtime_ns <= made.stat().st_mtime_ns for each in _objects(level))


def _linking(level: str, more: list[str]) -> list[str]:
    # Without -fopenmp: the library takes the OpenMP that torch has loaded, not a second one.
    return [*compiler(), "-shared", *_LINK, *map(str, _objects(level)), *more]


def _link(level: str) -> None:
    fresh = library(level).with_suffix(".new")
    wanted = _linking(level, _SELF_CONTAINED)
    if _tried([*wanted, "-o", str(fresh)]).returncode:  # no static libstdc++, or a linker without these flags
        _run(_linking(level, ["-o", str(fresh)]))
    fresh.replace(library(level))  # a process that has the old one mapped keeps it
    library(level).with_suffix(".stamp").write_text(shlex.join(wanted))


def _run(command: list[str]) -> None:
    done = _tried(command)
    if done.returncode:
        raise NoCompiler(f"{shlex.join(command)} failed:\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)  # noqa: T201


def _tried(command: list[str], source: str | None = None) -> subprocess.CompletedProcess[str]:
    """Return how a command of the compiler ended. Raises NoCompiler where it cannot be run."""
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoCompiler(f"{command[0]} cannot be run: {error.strerror}; set CXX to a C++ compiler") from error


def flags() -> argparse.ArgumentParser:
    """Return the flags of every command that builds levels."""
    found = argparse.ArgumentParser(allow_abbrev=False)
    found.add_argument("--force", action="store_true", help="compile every file, changed or not")
    found.add_argument("--progress", action="store_true", help="say how far the build is, and print no libraries")
    return found


def main(args: argparse.Namespace | None = None, wanted: Collection[str] | None = None) -> None:
    """Build these levels, or all, as the command line says."""
    args = args or flags().parse_args()
    try:
        libraries = build(args.force, args.progress, wanted)
    except NoCompiler as reason:
        sys.exit(str(reason))
    except OSError as error:
        sys.exit(f"{error.filename} cannot be written: {error.strerror}")
    if not args.progress:
        print(*libraries, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
