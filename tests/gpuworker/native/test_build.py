"""The native library: built wherever there is a compiler, loaded at the level that the processor runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpuworker.native import build
from gpuworker.native import library as native


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_a_host_with_a_compiler_has_the_library_of_every_level_that_it_runs() -> None:
    assert native.best() is native.load(native.levels_here()[-1])
    assert all(native.load(level) for level in native.levels_here())


def test_a_library_that_was_not_built_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda level: build.BUILT / "none.so")
    with pytest.raises(native.NativeUnavailable, match=r"none\.so was not built"):
        native.load.__wrapped__("scalar")


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("CXX", "false --really")
    with pytest.raises(build.NoCompiler, match="false --really"):
        build.build()
