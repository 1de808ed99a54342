"""Wall clocks that jump: one for each process that is started meanwhile, and no other clock of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

_SOURCE: Final = Path(__file__).with_name("clock_shift.c")
_COMPILERS: Final = ("cc", "gcc", "clang")
_BYTES: Final = 8


class Clocks(Protocol):
    """Sets the wall clock of a process so many seconds ahead of the machine's, or back."""

    def shift(self, pid: int, seconds: int) -> None: ...


class Preloaded:
    """Processes that start with `environment` have a clock of their own."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._folder = folder
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_SHIFTS": str(folder)}

    def shift(self, pid: int, seconds: int) -> None:
        """Raises FileNotFoundError for a process without such a clock."""
        with (self._folder / str(pid)).open("r+b") as file:
            file.write(seconds.to_bytes(_BYTES, sys.byteorder, signed=True))


def compiler() -> str | None:
    """Return a compiler of C, None where there is none, or where no library can be preloaded."""
    if not sys.platform.startswith("linux"):
        return None
    return next((found for name in _COMPILERS if (found := shutil.which(name)) is not None), None)


@contextmanager
def shiftable_clocks() -> Iterator[Preloaded]:
    """Let what this process starts have clocks that jump. Needs `compiler`."""
    found = compiler()
    assert found is not None
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="quire-clocks-") as name:
        library, shifts = Path(name) / "clock_shift.so", Path(name) / "shifts"
        subprocess.run([found, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
        shifts.mkdir()
        clocks = Preloaded(library, shifts)
        os.environ.update(clocks.environment)
        try:
            yield clocks
        finally:
            for each in clocks.environment:
                os.environ.pop(each)
                if each in before:
                    os.environ[each] = before[each]
