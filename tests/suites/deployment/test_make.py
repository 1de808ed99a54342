"""`make install`: what it says on a pipe while pip works, without a compiler, and after one was installed."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuworker.native.levels import levels_here
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("sh", "make", "grep", "touch", "test", "rm", "echo", "mkdir")
COMPILERS = ("c++", "g++", "clang++")
NEEDED = ("pyproject.toml", "protos/pyproject.toml", "requirements.lock", "constraints.txt", "hatch_build.py")
COPIED = ("Makefile", "docker/pip_lines.py", "gpuworker/native/build.py", "gpuworker/native/levels.py")
shown = runpy.run_path(str(ROOT / "docker/pip_lines.py"))["shown"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The Makefile over one C++ file of a line, and an environment whose packages are installed already."""
    folder = tmp_path / "clone"
    native = folder / "gpuworker" / "native"
    native.mkdir(parents=True)
    (native / "tiny.cpp").write_text('extern "C" int tiny() { return 1; }\n')
    for name in COPIED:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in NEEDED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    for stamp in (".serving", ".packages"):  # in this order
        (folder / ".venv" / stamp).touch()
    return folder


def install(folder: Path, path: str) -> str:
    """Return what `make install` prints, with these folders on PATH and no CXX."""
    make = shutil.which("make")
    assert make is not None, "the Makefile needs make"
    env = {key: value for key, value in os.environ.items() if key not in {"CXX", "MAKEFLAGS", "MAKELEVEL"}}
    command = [make, "--no-print-directory", "install", f"PYTHON={sys.executable}", "JOBS=1"]
    done = subprocess.run(
        command, cwd=folder, env=env | {"PATH": path}, capture_output=True, text=True, timeout=240.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
def test_what_serves_needs_the_kernels_of_this_processor_alone(clone: Path) -> None:
    """`make up` on the way to its command, which this clone lacks, builds one library; `make install` the others."""
    levels = runpy.run_path(str(clone / "gpuworker/native/build.py"))["LEVELS"]
    (clone / "gpuworker/__init__.py").touch()
    (clone / "gpuworker/native/__init__.py").touch()
    env = {key: value for key, value in os.environ.items() if key not in {"CXX", "MAKEFLAGS", "MAKELEVEL"}}
    command = ["make", ".venv/.kernels", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.name for each in libraries(clone)] == [f"libquire_cpu.{best_level()}.so"]
    install(clone, os.environ["PATH"])
    assert len(libraries(clone)) > 1 or len(levels) == 1


def best_level() -> str:
    """Return the best level of this processor, where the kernels of all levels are built."""
    return levels_here()[-1]


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "gpuworker/native/built").glob("*.so"))


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler, which the second half needs")
def test_without_a_compiler_make_says_so_and_builds_once_there_is_one(clone: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (bare / tool).symlink_to(found)
    for _ in range(2):  # it is said each time
        assert "no C++ compiler: slower torch kernels run on the CPU; install one" in install(clone, str(bare))
    assert libraries(clone) == []
    built = install(clone, os.environ["PATH"])
    assert "building the CPU kernels of all processors" in built
    assert "no C++ compiler" not in built
    assert len(libraries(clone)) >= 1
    assert "building" not in install(clone, os.environ["PATH"])


def test_a_compiler_that_fails_is_quoted_and_make_fails(clone: Path) -> None:
    (clone / "gpuworker/native/tiny.cpp").write_text("this is no C++\n")
    env = os.environ | {"CXX": "false --really"}
    done = subprocess.run(
        ["make", "install", f"PYTHON={sys.executable}"], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "false --really" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_build_that_is_silent_is_seen_to_go_on(clone: Path, tmp_path: Path) -> None:
    """A compiler that stands still goes on once `make` has said so."""
    lines = clone / "docker/pip_lines.py"
    lines.write_text(lines.read_text().replace("_SILENCE_SECONDS: Final = 15.0", "_SILENCE_SECONDS: Final = 0.05"))
    compiler, seen, output = tmp_path / "c++", tmp_path / "seen", tmp_path / "output"
    compiler.write_text(f"#!/bin/sh\nuntil test -e {seen}; do sleep 0.05; done\necho cannot go on >&2\nexit 1\n")
    compiler.chmod(0o755)
    env = os.environ | {"CXX": str(compiler)}
    command = ["make", "install", f"PYTHON={sys.executable}"]
    with (
        output.open("w") as written,
        subprocess.Popen(command, cwd=clone, env=env, stdout=written, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_until(lambda: "still at it after" in output.read_text())
        finally:
            seen.touch()
        assert process.wait(240.0) != 0
    assert "cannot go on" in output.read_text()
    assert not (clone / ".venv/.installed").exists()


def test_pips_lines_are_counted_by_the_twenty_and_its_errors_are_whole() -> None:
    said = [f"Collecting package-{number}\n" for number in range(41)]
    said += [
        "  Using cached a.whl (3 kB)\n",
        "  Downloading torch-2.whl (190.2 MB)\n",
        "  Downloading b.whl (9.1 MB)\n",
    ]
    said += ["WARNING: Location 'x' is ignored: y\n", "WARNING: the index is slow\n", "\n", "   ━━━━ 1/3\n"]
    said += ["  Attempting uninstall: setuptools\n", "    Found existing installation: setuptools 65.5.0\n"]
    said += ["Installing collected packages: a, b, c\n", "Successfully installed a-1 b-1 c-1\n", "ERROR: no space\n"]
    assert list(shown(said)) == [
        "    20 packages found",
        "    40 packages found",
        "    Downloading torch-2.whl (190.2 MB)",
        "WARNING: the index is slow",
        "    installing 3 packages",
        "ERROR: no space",
    ]


def test_a_line_is_shown_before_the_next_one_comes() -> None:
    """mawk, which did this before, showed nothing until pip had ended."""
    command = [sys.executable, str(ROOT / "docker/pip_lines.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("ERROR: first\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ERROR: first\n"  # and pip has not ended
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(60.0) == 0


def test_silence_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "docker/pip_lines.py"))
    main = script["main"]
    main.__globals__["_SILENCE_SECONDS"] = 0.05

    class Slow:
        def __iter__(self) -> Slow:
            return self

        def __next__(self) -> str:
            wait_until(lambda: "still at it" in capsys_text())
            raise StopIteration

    seen: list[str] = []

    def capsys_text() -> str:
        seen.append(capsys.readouterr().out)
        return "".join(seen)

    monkeypatch.setattr(sys, "stdin", Slow())
    main()
    assert "    still at it after 0 s\n" in "".join(seen)
