"""The native library: built wherever there is a compiler, loaded at the level that the processor runs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuworker.native import build, levels
from gpuworker.native import library as native


@pytest.mark.rest
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_a_host_with_a_compiler_has_the_library_of_every_level_that_it_runs() -> None:
    assert native.best() is native.load(native.levels_here()[-1])
    assert all(native.load(level) for level in native.levels_here())


def test_a_library_that_was_not_built_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "library", lambda level: build.BUILT / "none.so")
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(native.NativeUnavailable, match=r"none\.so was not built, although true is there"):
        native.load.__wrapped__("scalar")


def test_without_a_compiler_its_absence_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(levels, "library", lambda level: tmp_path / f"{level}.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    said = "avx2.so was not built, for there is no C++ compiler: install a C++ compiler (Debian: apt-get install g++)"
    assert levels.why_missing("avx2") == f"{said}, then run `make install`"
    (tmp_path / "avx2.so").touch()
    assert levels.why_missing("avx2") is None


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this processor for one of x86-64."""
    take_for("x86_64", monkeypatch)


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this processor for one of ARM."""
    take_for("aarch64", monkeypatch)


def take_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(levels, "LEVELS", build.levels_for(machine))


SKYLAKE_X = frozenset({"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"})
ICE_LAKE = SKYLAKE_X | {"avx512_vnni"}
SAPPHIRE_RAPIDS = ICE_LAKE | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
ZEN_3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
ALDER_LAKE = ZEN_3 | {"avx_vnni"}


@pytest.mark.usefixtures("x86")
@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (frozenset[str](), "scalar"),
        (ZEN_3 - {"fma"}, "scalar"),
        (ZEN_3, "avx2"),
        (ALDER_LAKE, "avx_vnni"),
        (SKYLAKE_X - {"avx512dq"}, "avx2"),
        (SKYLAKE_X | {"avx_vnni"}, "avx512"),
        (SKYLAKE_X, "avx512"),
        (ICE_LAKE, "avx512_vnni"),
        (ICE_LAKE | {"avx512_bf16"}, "avx512_bf16"),
        (SKYLAKE_X | {"avx512_bf16"}, "avx512"),
        (SAPPHIRE_RAPIDS, "amx"),
        (SAPPHIRE_RAPIDS - {"amx_int8"}, "avx512_bf16"),
    ],
)
def test_a_processor_takes_the_best_level_that_it_has_all_of(flags: frozenset[str], best: str) -> None:
    assert levels.levels_of(flags)[-1] == best


@pytest.mark.usefixtures("x86")
@pytest.mark.parametrize(
    ("processor", "lacking", "best"),
    [
        (SAPPHIRE_RAPIDS, {"amx"}, ["avx512_bf16", "avx512_vnni"]),
        (SAPPHIRE_RAPIDS, set[str](), ["avx512_bf16", "amx"]),
        (ICE_LAKE | {"avx512_bf16"}, set[str](), ["avx512_vnni", "avx512_bf16"]),
        (SAPPHIRE_RAPIDS - {"avx512_bf16"}, set[str](), ["avx512", "avx512_vnni"]),
    ],
)
def test_dot_products_of_bf16_are_not_the_best_of_a_processor_whose_matrix_unit_cannot_be_used(
    processor: frozenset[str], lacking: set[str], best: list[str]
) -> None:
    usable = tuple(level for level in levels.levels_of(processor) if level not in lacking)
    assert list(levels.best_last(usable, processor))[-2:] == best
    assert set(levels.best_last(usable, processor)) == set(usable)


# Features as in /proc/cpuinfo, written down by hand, and AT_HWCAP computed of them: none was read on such a processor.
CORTEX_A72 = "fp asimd evtstrm crc32 cpuid", 0x887
GRAVITON_1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", 0x8FF
GRAVITON_2 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs",
    0x10119FFF,
)
APPLE_M1 = (  # the first ones
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc asimddp",
    0x10FFFF,
)


@pytest.mark.usefixtures("arm")
@pytest.mark.parametrize(
    ("features", "bits", "best"),
    [
        (*CORTEX_A72, "neon"),
        (*GRAVITON_1, "neon"),
        (*GRAVITON_2, "neon_dotprod"),
        (*APPLE_M1, "neon_dotprod"),
        ("", 0, "scalar"),
    ],
)
def test_a_processor_of_arm_takes_the_best_level_that_it_has_all_of(features: str, bits: int, best: str) -> None:
    flags = frozenset(features.split())
    assert levels.levels_of(flags)[-1] == best
    read = levels.flags_of_hwcap(bits)
    assert read <= flags
    assert levels.levels_of(read) == levels.levels_of(flags)


@pytest.mark.usefixtures("x86")
def test_a_level_that_the_processor_lacks_is_refused_with_those_that_it_has() -> None:
    said = levels.why_not("avx512_vnni", SKYLAKE_X)
    assert said == "this processor lacks avx512_vnni; it runs scalar, avx2, avx512"
    assert levels.why_not("neon", ZEN_3) == "no x86_64 processor has it; this one runs scalar, avx2"


@pytest.mark.usefixtures("arm")
def test_so_is_one_that_an_arm_processor_lacks() -> None:
    flags = levels.flags_of_hwcap(CORTEX_A72[1])
    said = levels.why_not("neon_dotprod", flags)
    assert said == "this processor lacks asimddp, atomics; it runs scalar, neon"
    assert levels.why_not("avx2", flags) == "no aarch64 processor has it; this one runs scalar, neon"


@pytest.mark.usefixtures("x86")
def test_a_level_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for level in (native.levels_here()[0], native.levels_here()[-1]):
            native.use_level(level)
            assert native.best() is native.load(level)
            assert native.level_of(native.load(level)) == level
        monkeypatch.setattr(levels, "processor_flags", lambda: ZEN_3)
        lacking = "avx512bw, avx512dq, avx512f, avx512vl"
        with pytest.raises(native.NativeUnavailable, match=f"level avx512: this processor lacks {lacking}"):
            native.use_level("avx512")
    finally:
        native.use_level("auto")
    assert native.best() is native.load(native.levels_here()[-1])


BEYOND = {
    "scalar": r"%ymm|%zmm|vfmadd",
    "avx2": r"%zmm|%k[1-7]|vpdp",
    "avx_vnni": r"%zmm|%k[1-7]|(?<!\{vex\} )vpdp",
    "avx512": r"vpdp(bu|ws)sd|vdpbf16ps|vcvtne2?ps2bf16",
    "avx512_vnni": r"vdpbf16ps|vcvtne2?ps2bf16",
    "avx512_bf16": r"%tmm",
    "neon": r"\b[su]dot\b|\bz\d+\.",
    "neon_dotprod": r"\bz\d+\.|mmla|\bbfdot\b",
}


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
@pytest.mark.parametrize("level", [level for level in native.levels_here() if level in BEYOND])
def test_a_library_has_no_instruction_beyond_its_level(level: str) -> None:
    """A better processor runs such an instruction without a word."""
    code = instructions(build.library(level))
    assert "ret" in code
    assert re.search(BEYOND[level], code) is None
    assert ("{vex} vpdpwssd" in code) == (level == "avx_vnni")


def instructions(library: Path, objdump: str = "objdump") -> str:
    command = [objdump, "-d", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif("avx512_bf16" not in build.LEVELS, reason="levels of x86-64")
def test_sources_without_dot_products_serve_three_levels() -> None:
    at = {path.stem: build._compiled_at("avx512_bf16", path) for path in build.SOURCE.glob("*.cpp")}
    assert {at["sample"], at["attention"]} == {"avx512"}
    assert {at["linear_tile"], at["linear_tile_whole"]} == {"avx512"}
    assert at["linear_tile_bytes"] == "avx512_vnni"
    assert {at["attention_tiles"], at["linear_tile_bf16"]} == {"avx512_bf16"}
    assert build._compiled_at("avx512_vnni", build.SOURCE / "linear_tile_bf16.cpp") == "avx512"
    assert build._compiled_at("avx2", build.SOURCE / "sample.cpp") == "avx2"
    assert build._compiled_at("avx_vnni", build.SOURCE / "sample.cpp") == "avx2"
    assert build._compiled_at("avx_vnni", build.SOURCE / "attention_rows.cpp") == "avx_vnni"
    assert build._compiled_at("amx", build.SOURCE / "attention_tiles.cpp") == "amx"
    assert build._compiled_at("amx", build.SOURCE / "attention_rows.cpp") == "avx512_bf16"


@pytest.mark.skipif("avx_vnni" not in build.LEVELS, reason="levels of x86-64")
def test_a_level_that_the_assembler_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setattr(levels, "processor_flags", lambda: ALDER_LAKE)
    build.library("avx_vnni").touch()
    assert levels.levels_here.__wrapped__()[-1] == "avx_vnni"
    monkeypatch.setenv("CXX", "false")
    assert not build.can_make("avx_vnni")
    assert build.can_make("avx2")
    assert levels.levels_here.__wrapped__() == ("scalar", "avx2")
    said = "libquire_cpu.avx_vnni.so was not built: false or its assembler is too old; take GCC 11 or newer"
    assert levels.why_not("avx_vnni") == f"{said}, run `make install`"


# Writes `object` where -o says, and the name of the source to a log. FAILS names a source on which it kills the build,
# after half of the object, once. With TOO_OLD_FOR it refuses flags, as a compiler does that is older than they are.
FAKE_COMPILER = """#!/bin/sh
sources= out= old=
while [ $# -gt 0 ]; do
  case "$1" in
    -o) out=$2; shift ;;
    -c) sources=$2; shift ;;
    -shared) sources=link ;;
    -mavx512bf16|-mavxvnni) [ -z "$TOO_OLD_FOR" ] || old=$1 ;;
  esac
  shift
done
[ -z "$old" ] || { echo "unrecognized command-line option '$old'" >&2; exit 1; }
[ "$out" != /dev/null ] || exit 0
echo object >"$out"
case "$sources" in
  *.cpp) basename "$sources" .cpp >>"$COMPILED" ;;
esac
case "$sources" in
  */"$FAILS".cpp) [ -e "$COMPILED.killed" ] || { touch "$COMPILED.killed"; echo half >"$out"; kill -9 $PPID; } ;;
esac
"""


@pytest.fixture
def native_folder(tmp_path: Path) -> Path:
    """A copy of the build with four sources, two of which take long to compile."""
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copy(build.__file__, folder / "build.py")
    for name in ("a", "b", *build._LONGEST[:2]):
        (folder / f"{name}.cpp").touch()
    (tmp_path / "fake").write_text(FAKE_COMPILER)
    (tmp_path / "fake").chmod(0o755)
    return folder


def run_build(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the build on one core, with the fake compiler; what it compiles is added to `compiled`."""
    made = folder.parent
    variables = {**os.environ, "CXX": str(made / "fake"), "COMPILED": str(made / "compiled"), "FAILS": "-", **env}
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, str(folder / "build.py"), *flags]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_what_takes_longest_is_compiled_first(native_folder: Path) -> None:
    done = run_build(native_folder)
    assert done.returncode == 0, done.stderr
    compiled = (native_folder.parent / "compiled").read_text().split()
    firsts = len(compiled) // 2
    assert set(compiled[:firsts]) <= set(build._LONGEST)
    assert set(compiled[firsts:]) == {"a", "b"}


def test_the_sources_that_the_build_names_are_there() -> None:
    besides = [name for names in build._BESIDES.values() for name in names]
    for name in (*build._LONGEST, *build._BESIDES, *besides):
        assert (build.SOURCE / f"{name}.cpp").is_file(), name
    assert not set(besides) & set(build._LONGEST), "which name a run of the compiler each"


@pytest.mark.skipif("avx512_bf16" not in build.LEVELS, reason="levels of x86-64")
def test_sources_of_one_run_of_the_compiler_serve_the_same_levels() -> None:
    for name, others in build._BESIDES.items():
        for level in build.LEVELS:
            at = {build._compiled_at(level, build.SOURCE / f"{each}.cpp") for each in (name, *others)}
            assert len(at) == 1, (name, level, at)


def test_a_change_of_a_source_beside_another_compiles_both_again(native_folder: Path) -> None:
    first, (beside, *_) = next(iter(build._BESIDES.items()))
    (native_folder / f"{first}.cpp").touch()
    (native_folder / f"{beside}.cpp").touch()
    assert run_build(native_folder).returncode == 0
    made = native_folder.parent / "compiled"
    assert beside not in made.read_text().split()
    made.unlink()
    (native_folder / f"{beside}.cpp").write_text("// changed")
    assert run_build(native_folder).returncode == 0
    assert set(made.read_text().split()) == {first}


def test_a_build_that_was_killed_goes_on_where_it_stopped(native_folder: Path) -> None:
    made = native_folder.parent / "compiled"
    assert run_build(native_folder, FAILS="b").returncode == -9
    before = made.read_text().split()
    assert before[-1] == "b"
    assert list((native_folder / "built").glob("*.so")) == []
    assert run_build(native_folder).returncode == 0
    after = made.read_text().split()[len(before) :]
    assert "b" in after  # half of an object is none
    assert not set(after) & set(build._LONGEST)
    assert {path.read_text() for path in (native_folder / "built").glob("*.o")} == {"object\n"}
    assert run_build(native_folder).returncode == 0
    assert made.read_text().split() == before + after


@pytest.mark.skipif("avx512_bf16" not in build.LEVELS, reason="levels of x86-64")
def test_a_compiler_that_is_too_old_for_some_levels_makes_the_others(native_folder: Path) -> None:
    done = run_build(native_folder, TOO_OLD_FOR="some")
    assert done.returncode == 0, done.stderr
    made = {path.name.split(".")[1] for path in (native_folder / "built").glob("*.so")}
    assert made == {"scalar", "avx2", "avx512", "avx512_vnni"}
    fake = native_folder.parent / "fake"
    said = f"left out avx_vnni, avx512_bf16, amx: {fake} or its assembler is too old; take GCC 11 or newer"
    assert said in done.stderr
    assert said in run_build(native_folder, "--progress", TOO_OLD_FOR="some").stdout


@pytest.mark.usefixtures("x86")
def test_the_best_level_that_the_compiler_makes_is_built_with_a_line_on_what_the_best_one_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr(sys, "argv", ["levels"])
    monkeypatch.setenv("CXX", "g++-9")
    monkeypatch.setattr(levels, "processor_flags", lambda: ICE_LAKE | {"avx512_bf16"})
    monkeypatch.setattr(levels, "_flags_of_processor", lambda: ICE_LAKE | {"avx512_bf16"})
    monkeypatch.setattr(levels, "can_make", lambda level: level in {"avx2", "avx512", "avx512_vnni"})
    monkeypatch.setattr(build, "main", lambda _, wanted: asked.append(wanted))
    levels.main()
    assert asked == [("avx512_vnni",)]
    said = "avx512_vnni instead of avx512_bf16: g++-9 or its assembler is too old; take GCC 10 or newer"
    assert said in capsys.readouterr().out
    monkeypatch.setattr(levels, "processor_flags", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(levels, "_flags_of_processor", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(levels, "can_make", lambda level: level != "amx")
    levels.main()
    assert asked[1:] == [("avx512_vnni",)]
    assert "avx512_vnni instead of amx" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["levels", "--plainest"])
    levels.main()
    assert asked[2:] == [("scalar", "avx512_vnni")]
    monkeypatch.setattr(levels, "processor_flags", frozenset[str])
    monkeypatch.setattr(levels, "_flags_of_processor", frozenset[str])
    monkeypatch.setattr(levels, "can_make", lambda level: level != "scalar")
    with pytest.raises(SystemExit, match=r"g\+\+-9 or its assembler is too old; take GCC 12 or newer"):
        levels.main()


ARM_COMPILER = "aarch64-linux-gnu-g++"  # Debian: g++-aarch64-linux-gnu


@pytest.mark.skipif(not shutil.which(ARM_COMPILER), reason="no cross compiler")
@pytest.mark.parametrize("source", ["attention", "linear", "llama", "sample"])
def test_the_scalar_level_compiles_for_arm(source: str) -> None:
    command = [ARM_COMPILER, *build._COMMON, "-Werror", "-fsyntax-only", str(build.SOURCE / f"{source}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.rest
@pytest.mark.skipif(not shutil.which(ARM_COMPILER), reason="no cross compiler")
def test_the_neon_levels_are_built_for_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without optimisation, which takes a third of the time."""
    wanted = {name: flags for name, flags in build.levels_for("aarch64").items() if name != "scalar"}
    monkeypatch.setattr(build, "LEVELS", wanted)
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setattr(build, "_COMMON", [*build._COMMON, "-Werror", "-O0"])
    monkeypatch.setenv("CXX", ARM_COMPILER)
    assert build.build() == [tmp_path / "libquire_cpu.neon.so", tmp_path / "libquire_cpu.neon_dotprod.so"]
    code = {level: instructions(build.library(level), "aarch64-linux-gnu-objdump") for level in wanted}
    assert re.search(r"\bfmla\s+v", code["neon"])
    assert re.search(r"\bsdot\s+v", code["neon_dotprod"])
    assert [level for level in wanted if re.search(BEYOND[level], code[level])] == []


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("CXX", "false --really")
    with pytest.raises(build.NoCompiler, match="false --really"):
        build.build()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_a_system_without_a_static_library_of_cxx_links_the_shared_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what is linked is not linked again."""
    (tmp_path / "tiny.cpp").write_text(
        '#include <string>\nextern "C" int tiny() { return (int)std::string().size(); }\n'
    )
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setattr(build, "_SELF_CONTAINED", ["-lthere_is_none_of_this_name"])
    (made,) = build.build(wanted=["scalar"])
    first = made.stat().st_mtime_ns
    assert build.build(wanted=["scalar"]) == [made]
    assert made.stat().st_mtime_ns == first
    monkeypatch.setattr(build, "_SELF_CONTAINED", [])
    build.build(wanted=["scalar"])
    assert made.stat().st_mtime_ns > first, "other flags"


def test_a_worker_without_kernels_says_that_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`quire serve` shows this line of its workers."""
    monkeypatch.setattr(levels, "library", lambda level: tmp_path / f"{level}.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    assert native.best.__wrapped__() is None
    said = "no native CPU kernels, so the torch ones run, which are several times slower"
    assert said in caplog.text
    assert "there is no C++ compiler: install a C++ compiler (Debian: apt-get install g++)" in caplog.text


@pytest.mark.parametrize("flag", ["--fast", "--progres", "all"])
def test_a_flag_that_is_none_is_refused_before_anything_is_compiled(flag: str) -> None:
    done = subprocess.run(
        [sys.executable, build.__file__, flag], capture_output=True, text=True, check=False, env={"CXX": "false"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"unrecognized arguments: {flag}" in done.stderr
