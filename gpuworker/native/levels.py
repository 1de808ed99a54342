"""Which native library suits this processor, and whether it was built. Imports no torch.

`python -m gpuworker.native.levels` builds the library of the best level, which is all that this processor needs.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

from gpuworker.native import build
from gpuworker.native.build import LEVELS, NoCompiler, can_make, compiler, levels_for, library, may_lack, too_old

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_NEON = frozenset({"asimd"})
# From the plainest to the best of each architecture, with the flags of /proc/cpuinfo that each needs.
_NEEDS = {
    "scalar": frozenset[str](),
    "avx2": _AVX2,
    "avx_vnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512_bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx": _AVX512 | {"avx512_vnni", "avx512_bf16"} | _AMX,
    "neon": _NEON,
    "neon_dotprod": _NEON | {"asimddp", "atomics"},  # of armv8.2-a the compiler takes atomic instructions too
}
NAMES = tuple(_NEEDS)
# Of Linux on x86-64: a system call, and its arguments (arch/x86/include/uapi/asm/prctl.h, asm/fpu/types.h).
_ARCH_PRCTL, _REQUEST_REGISTERS, _AMX_REGISTERS = 158, 0x1023, 18
# Of Linux on aarch64: where the kernel says what a process may use, and the bits of flags (arch/arm64's asm/hwcap.h).
_AT_HWCAP = 16
_HWCAP_BITS = {"asimd": 1, "atomics": 8, "asimddp": 20}
# In a clone `make` does more than this; what pip installed has no Makefile.
_IN_CLONE = (Path(__file__).resolve().parents[2] / "Makefile").is_file()
BUILD = "`make install`" if _IN_CLONE else f"`{sys.executable} -m gpuworker.native.levels`"
INSTALL_COMPILER = f"install a C++ compiler (Debian: apt-get install g++), then run {BUILD}"


@functools.cache
def levels_here() -> tuple[str, ...]:
    """Return the levels that this processor can run, from the plainest to the best, but those that no build made."""
    built = tuple(level for level in levels_of(processor_flags()) if not may_lack(level) or library(level).is_file())
    return best_last(built, _flags_of_processor())


def levels_of(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the levels that a processor with these flags can run, from the plainest to the best."""
    return tuple(level for level in LEVELS if _NEEDS[level] <= flags)


def best_last(levels: tuple[str, ...], flags: frozenset[str]) -> tuple[str, ...]:
    """Return the levels that can be used on a processor, given from the plainest to the best, so that the best is last.

    Processors with AMX take longer for dot products of bf16 than for as many multiplications of floats (decision 0036).
    So where the matrix unit cannot be used, a level without dot products of bf16 is the best.
    """
    if "amx" in levels or "avx512_bf16" not in levels or not flags >= _AMX:
        return levels
    return (*(level for level in levels if level != "avx512_vnni"), "avx512_vnni")


def amx_is_kept() -> bool:
    """Return whether the processor has AMX, and the kernel keeps it from this process."""
    return _flags_of_processor() >= _AMX and not _may_use_amx()


def why_not(level: str, flags: frozenset[str] | None = None) -> str | None:
    """Return why a level cannot be used on a processor (this one unless `flags` are given), and what to do."""
    flags = processor_flags() if flags is None else flags
    if level not in levels_for(platform.machine()):
        return f"no {platform.machine()} processor has it; this one runs {', '.join(levels_of(flags))}"
    if lacking := sorted(_NEEDS[level] - flags):
        lacks = f"this processor lacks {', '.join(lacking)}"
        if _AMX.issuperset(lacking) and amx_is_kept():
            lacks = "the kernel gives this process no registers of AMX (Linux does from 5.16 on; sandboxes may not)"
        return f"{lacks}; it runs {', '.join(levels_of(flags))}"
    return why_missing(level)


def why_missing(level: str) -> str | None:
    """Return why the library of a level is not there, and what to do; None where it is."""
    path = library(level)
    if path.is_file():
        return None
    try:
        found = compiler()[0]
    except NoCompiler:
        return f"{path.name} was not built, for there is no C++ compiler: {INSTALL_COMPILER}"
    if not can_make(level):
        return f"{path.name} was not built: {too_old([level])}, run {BUILD}"
    return f"{path.name} was not built, although {found} is there: run {BUILD}"


def processor_flags() -> frozenset[str]:
    """Return the flags of /proc/cpuinfo that this process may use; none where it cannot be read."""
    return _flags_of_processor() - _AMX if amx_is_kept() else _flags_of_processor()


def flags_of_hwcap(bits: int) -> frozenset[str]:
    """Return the flags that levels need, by their names in /proc/cpuinfo, of what an aarch64 kernel gives a process."""
    return frozenset(flag for flag, bit in _HWCAP_BITS.items() if bits >> bit & 1)


def _flags_of_processor() -> frozenset[str]:
    """Return the flags of /proc/cpuinfo; on aarch64 what the kernel says, for emulators show their host's file."""
    if platform.machine() == "aarch64":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
        return flags_of_hwcap(int(getauxval(_AT_HWCAP)))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


@functools.cache
def _may_use_amx() -> bool:
    """Ask the kernel for the registers of AMX, for all threads of this process; return whether it gives them.

    Kernels before 5.16, some sandboxes, and a process with a signal stack that is too small for them do not.
    """
    return not int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_REGISTERS, _AMX_REGISTERS))


def main() -> None:
    """Build the best level that this processor can run and the compiler can make."""
    flags = build.flags()
    flags.add_argument("--plainest", action="store_true", help="build the plainest level, too: tests compare the two")
    args = flags.parse_args()
    wanted, processor = levels_of(processor_flags()), _flags_of_processor()
    try:
        levels = best_last(tuple(level for level in wanted if can_make(level)), processor)
        if not levels:
            sys.exit(too_old(wanted))
        if levels[-1] != (best := best_last(wanted, processor)[-1]):
            print(f"    {levels[-1]} instead of {best}: {too_old([best])}", flush=True)  # noqa: T201
    except NoCompiler as reason:
        sys.exit(str(reason))
    build.main(args, (levels[0], levels[-1]) if args.plainest else levels[-1:])


if __name__ == "__main__":
    main()
