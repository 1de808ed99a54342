"""The phases of a team (gpuworker/native/threads.h): they wait for pieces of work, and for no member."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuworker.native.build import SOURCE, NoCompiler, compiler

SECONDS = 60.0
PROGRAM = Path(__file__).with_name("phases.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        command = compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))
    made = tmp_path_factory.mktemp("phases") / "phases"
    flags = ["-std=c++17", "-O2", "-fopenmp", f"-I{SOURCE}"]
    subprocess.run([*command, *flags, str(PROGRAM), "-o", str(made)], check=True, timeout=SECONDS)
    return made


def said(program: Path, case: str) -> str:
    return subprocess.run([program, case], capture_output=True, text=True, check=True, timeout=SECONDS).stdout.strip()


def test_a_member_that_comes_late_holds_nobody_up_and_repeats_nothing(program: Path) -> None:
    assert said(program, "late") == "800 pieces, 0 of them by the late member"


def test_a_phase_ends_when_its_last_piece_is_done(program: Path) -> None:
    assert said(program, "held") == "50 of 50 sums are right, 0 phases began early"


def test_more_members_than_cores_do_each_piece_once(program: Path) -> None:
    assert said(program, "crowd") == "0 phases were cut short"
