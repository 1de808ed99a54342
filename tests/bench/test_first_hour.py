"""Parts of the first-hour benchmark that can be told exactly: PATH, steps, and how they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.first_hour import (
    MADE,
    NOTES,
    PARTS,
    ROOT,
    SINGLE,
    Failed,
    bare_path,
    bytes_of,
    environment,
    lines_of,
    run,
    until,
    without_compilers,
)


def program(folder: Path, name: str, words: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho {words}\n")
    (folder / name).chmod(0o755)


def test_a_path_without_compilers_has_everything_else(tmp_path: Path) -> None:
    compilers = ("c++", "g++", "g++-12", "x86_64-linux-gnu-g++", "clang++-19", "cc", "gcc")
    for name in (*compilers, "make", "cmake", "ccache", "python3"):
        program(tmp_path / "first", name, "first")
    program(tmp_path / "second", "make", "second")
    path = without_compilers(tmp_path / "bin", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")
    assert {each.name for each in Path(path).iterdir()} == {"make", "cmake", "ccache"}
    assert run(["make"], tmp_path, environment(path)) == "first\n", "the first on the PATH"


def test_the_path_is_bare_of_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'venv' / 'bin'}{os.pathsep}/bin")
    assert bare_path() == "/bin"


def test_options_of_this_process_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_MODEL", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "CXX"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LANG", "C.UTF-8")
    found = environment("/bin")
    assert found["LANG"] == "C.UTF-8"
    assert not {"QUIRE_MODEL", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "CXX"} & set(found)


def test_a_command_is_read_until_a_line_and_then_interrupted(tmp_path: Path) -> None:
    script = "import time\nprint('  ready: now', flush=True)\ntime.sleep(600)"
    with lines_of([sys.executable, "-c", script], tmp_path, os.environ) as lines:
        until(lines, lambda line: " ready: " in line)


def test_a_command_that_ends_early_fails_with_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such package')"]
    with lines_of(command, tmp_path, os.environ) as lines, pytest.raises(Failed, match="no such package"):
        until(lines, lambda line: " ready: " in line)
    with pytest.raises(Failed, match="boom"):
        run([sys.executable, "-c", "raise SystemExit('boom')"], tmp_path, os.environ)


def test_the_makefile_still_says_the_steps() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(f'echo "{step} ' in makefile for step in MADE if step[1:2] == "/")


def test_the_bytes_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "one").write_bytes(bytes(1000))
    (tmp_path / "two").write_bytes(bytes(24))
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    (tmp_path / "lib" / "again").symlink_to(tmp_path / "two")
    assert bytes_of(tmp_path) == 1024


def test_a_figure_of_one_part_has_one_name() -> None:
    assert {name for names in SINGLE.values() for name in names} <= set(NOTES)
    assert set(SINGLE) <= set(PARTS)
