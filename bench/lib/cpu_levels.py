"""Benchmarks of the native CPU kernels at a level of vector instructions, with torch and oneDNN held to that level.

oneDNN and torch read their limits when they load. Each level therefore runs in a child process with these variables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from bench.lib.harness import end_with_json, report_columns
from gpuworker.native.levels import NAMES, levels_here, why_not
from gpuworker.native.library import use_level

_CELL: Final = re.compile(r"_m\d+_")  # a figure of one shape and number of rows: in the JSON object alone
_ONEDNN: Final = {
    "scalar": "SSE41",
    "avx2": "AVX2",
    "avx_vnni": "AVX2_VNNI",
    "avx512": "AVX512_CORE",
    "avx512_vnni": "AVX512_CORE_VNNI",
    "avx512_bf16": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}


def limits(level: str) -> dict[str, str]:
    """Return the environment in which oneDNN, torch and MKL use no better instructions than a level.

    For ARM oneDNN documents no limit. torch has kernels for SVE there, which "default" leaves out.
    """
    if level.startswith("neon"):
        return {"ATEN_CPU_CAPABILITY": "default"}
    aten = "default" if level == "scalar" else "avx2" if level in ("avx2", "avx_vnni") else "avx512"
    mkl = "SSE4_2" if level == "scalar" else aten.upper()
    return {"ONEDNN_MAX_CPU_ISA": _ONEDNN[level], "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl}


def add_level_flag(flags: argparse.ArgumentParser) -> None:
    words = "one level or several (avx2,avx512), or all that run here, for Quire and the references; unset: the best"
    flags.add_argument("--level", default="", type=_levels, help=words)
    flags.add_argument("--at", default="", choices=["", *NAMES], help=argparse.SUPPRESS)  # in a child process


def _levels(words: str) -> tuple[str, ...]:
    """Return the levels that an option names. Raises ArgumentTypeError for one that cannot run here."""
    names = levels_here() if words == "all" else tuple(filter(None, words.split(",")))
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a level; expected all, {', '.join(NAMES)}")
        if reason := why_not(name):
            raise argparse.ArgumentTypeError(f"level {name}: {reason}")
    return names


def at_levels(bench: str, options: argparse.Namespace, notes: dict[str, str]) -> bool:
    """Run the benchmark once for each level that was asked for, and show them side by side; False where none was.

    In a child process, makes its level that of the native library.
    """
    if options.at:
        use_level(options.at)
    if options.at or not options.level:
        return False
    columns = {level: _child(bench, level, sys.argv[1:]) for level in options.level}
    shown = {level: {name: row[name] for name in row if not _CELL.search(name)} for level, row in columns.items()}
    report_columns(bench, shown, notes, as_json=False)
    named = {f"{name}_{level}": value for level, row in columns.items() for name, value in row.items()}
    end_with_json(bench, named, options.json)
    return True


def _child(bench: str, level: str, argv: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, "-m", f"bench.{bench}", *argv, "--at", level, "--json"]
    done = subprocess.run(command, env={**os.environ, **limits(level)}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the benchmark failed at level {level}, with status {done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["figures"]
    return figures
