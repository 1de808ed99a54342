"""Runs the tests of native code under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

The library is built a second time, with checks, and loaded into a Python that has the sanitizer's runtime preloaded.
The first bad access, overflow or misuse ends the run with a report. Torch and numpy allocate through the sanitizer too,
so that a read or a write beside an array is found. NATIVE_SANITIZED names a level other than the best one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpuworker.native import build
from gpuworker.native.library import levels_here

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/gpuworker/native",
    "tests/gpuworker/sampling",
    "tests/gpuworker/attention/test_native_backend.py",
    "tests/gpuworker/models/llama/test_cpu_model.py",
    "tests/gpuworker/models/llama/test_experts.py",
    "tests/gpuworker/runner/test_model_runner.py",
)
# These need a build of several levels.
LEFT_OUT = ("tests/gpuworker/native/test_build.py", "tests/gpuworker/native/test_amx.py")
# Leaks are Python's own habit at exit. The stacks of torch's frames are not unwound: that takes most of the time.
_OPTIONS = "detect_leaks=0:malloc_context_size=5:detect_odr_violation=0"


def runtimes(compiler: list[str]) -> str:
    """Return what must be loaded before Python: the sanitizer, and the C++ library whose exceptions it intercepts."""
    names = ("libasan.so", "libstdc++.so")
    found = [subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    missing = [name for name, path in zip(names, found, strict=True) if not Path(path).is_absolute()]
    if missing:
        raise SystemExit(f"{' '.join(compiler)} has no {', '.join(missing)}; use g++ (CXX=g++), which brings them")
    return " ".join(found)


def main(tests: list[str]) -> int:
    checked = {**os.environ, "NATIVE_SANITIZED": build.SANITIZED or levels_here()[-1]}
    subprocess.run([sys.executable, str(build.SOURCE / "build.py")], env=checked, check=True)
    checked |= {"LD_PRELOAD": runtimes(build.compiler()), "ASAN_OPTIONS": _OPTIONS}
    flags = ["-n", "0", "-q", "-p", "no:randomly", *(f"--ignore={path}" for path in LEFT_OUT)]
    command = [sys.executable, "-m", "pytest", *flags, *(tests or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=checked, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
