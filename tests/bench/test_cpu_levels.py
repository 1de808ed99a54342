"""Benchmarks at a level of vector instructions: which names are taken, and what is held to the level."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from bench.lib.cpu_levels import add_level_flag, limits
from gpuworker.native import library as native
from gpuworker.native.levels import NAMES, levels_here


def parsed(*words: str) -> argparse.Namespace:
    flags = argparse.ArgumentParser()
    add_level_flag(flags)
    return flags.parse_args(words)


@pytest.mark.skipif(native.best() is None, reason="the native library was not built")
def test_all_are_the_levels_of_this_processor() -> None:
    assert parsed("--level", "all").level == levels_here()
    assert parsed("--level", "scalar").level == ("scalar",)
    assert parsed().level == ()


def test_an_unknown_level_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--level", "avx3")
    assert f"'avx3' is not a level; expected all, {', '.join(NAMES)}" in capsys.readouterr().err


def test_each_level_limits_the_references() -> None:
    assert {level: limits(level).get("ONEDNN_MAX_CPU_ISA") for level in NAMES} == {
        "scalar": "SSE41",
        "avx2": "AVX2",
        "avx_vnni": "AVX2_VNNI",
        "avx512": "AVX512_CORE",
        "avx512_vnni": "AVX512_CORE_VNNI",
        "avx512_bf16": "AVX512_CORE_BF16",
        "amx": "AVX512_CORE_AMX",
        "neon": None,
        "neon_dotprod": None,
    }
    assert limits("neon") == limits("neon_dotprod") == {"ATEN_CPU_CAPABILITY": "default"}
    assert limits("avx2")["ATEN_CPU_CAPABILITY"] == limits("avx_vnni")["ATEN_CPU_CAPABILITY"] == "avx2"


@pytest.mark.skipif(len(levels_here()) < 2 or native.best() is None, reason="no level beside the scalar one")
def test_torch_and_the_kernels_run_at_the_level_of_their_child() -> None:
    level = levels_here()[1]
    script = (
        "import argparse, json, torch; from bench.lib.cpu_levels import add_level_flag, at_levels;"
        "from gpuworker.native import library as native; flags = argparse.ArgumentParser(); add_level_flag(flags);"
        "asked = at_levels('none', flags.parse_args(), {});"
        "print(json.dumps([asked, native.level_of(native.best()), torch.backends.cpu.get_cpu_capability()]))"
    )
    command = [sys.executable, "-c", script, "--level", "all", "--at", level]
    environ = {**os.environ, **limits(level)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=240.0)
    assert json.loads(done.stdout) == [False, level, limits(level)["ATEN_CPU_CAPABILITY"].upper()]
