"""Puts the native CPU kernels into a wheel, where QUIRE_CPU_LEVELS asks for them.

    none      no kernels, no compiler, a wheel for any machine; what `pip install .` does
    native    those of this machine's processor: `QUIRE_CPU_LEVELS=native pip install '.[serve]'`
    all       those of every processor of this architecture; the wheels of `make dist` and of the worker's image

A build backend cannot see which extras pip installs, and only the worker's wants kernels. pip shows nothing of a build
either, and keeps what it built: a wheel with the kernels of one processor would be slow on the next one. So nothing is
compiled unasked. A worker without kernels says in its log how to build them, and so does `quire doctor`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What builds the libraries, and prints their paths.
_SCRIPTS: Final = {"none": (), "native": ("-m", "gpuworker.native.levels"), "all": ("gpuworker/native/build.py",)}
# The versions of symbols that a library takes from the system, as it names them: GLIBC_2.34, GLIBCXX_3.4.30, GCC_4.2.0.
_SYMBOLS: Final = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+)\.(\d+)")
_OLDEST_LIBGCC: Final = (4, 2)  # that any system has; what later ones add is linked in (gpuworker/native/build.py)


class NativeKernels(BuildHookInterface[Any]):
    """Adds the libraries, and the tag of the machines that they run on."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build; an editable install finds the libraries where they are built."""
        levels = os.environ.get("QUIRE_CPU_LEVELS", "none")
        if levels not in _SCRIPTS:
            self.app.abort(f"QUIRE_CPU_LEVELS is {levels!r}; expected {', '.join(_SCRIPTS)}")
        libraries = self._built(levels)
        if version != "editable" and libraries:
            contents = [path.read_bytes() for path in libraries]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_of(contents) if levels == 'all' else this_platform()}"
            build_data["force_include"] |= {str(path): str(path.relative_to(self.root)) for path in libraries}

    def _built(self, levels: str) -> list[Path]:
        if not _SCRIPTS[levels]:
            return []
        command = [sys.executable, *_SCRIPTS[levels]]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.abort(f"QUIRE_CPU_LEVELS is {levels}, and the kernels cannot be built: {done.stderr}")
        return [Path(line) for line in done.stdout.splitlines()]


def platform_of(libraries: Iterable[bytes]) -> str:
    """Return the platform tag of a wheel with these libraries: the oldest C library that has their symbols (PEP 600).

    One that takes more of the system than a manylinux wheel may, such as its libstdc++, is for systems like this one.
    """
    found = {(name, (int(major), int(minor))) for each in libraries for name, major, minor in _SYMBOLS.findall(each)}
    oldest = {name: max(version for other, version in found if other == name) for name, _ in found}
    major, minor = oldest.pop(b"GLIBC", (0, 0))
    libgcc = oldest.pop(b"GCC", (0, 0))
    if not major or libgcc > _OLDEST_LIBGCC or oldest:
        return this_platform()
    return f"manylinux_{major}_{minor}_{this_platform().removeprefix('linux_')}"


def this_platform() -> str:
    """Return the platform tag of this machine, which no index takes."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())
