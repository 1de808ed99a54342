"""Which third of the rest's tests and of Triton's `.ci/run` takes: the day of the last commit decides.

Files that the commits of the last three hours have changed are always taken, and Triton's tests after a change of the
kernels. `python -m tests.support.thirds` prints the variables for the shell.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Collection
from typing import Final

THIRDS: Final = 3
_DAY: Final = 86400
_RECENT: Final = 3 * 3600
_OF_KERNELS: Final = ("gpuworker/kernels/", "tests/suites/triton_")


def third_of(seconds: int) -> int:
    """Return the third of a day, by unix seconds."""
    return seconds // _DAY % THIRDS


def in_third(name: str, third: int, always: Collection[str] = ()) -> bool:
    """Return whether a file or a test, named from the top of the tree, is in a third; those of `always` are in all."""
    return name in always or zlib.crc32(name.encode()) % THIRDS == third


def change_kernels(changed: Collection[str]) -> bool:
    """Return whether files that have changed are Triton's kernels or of their tests: then all of these run."""
    return any(name.startswith(_OF_KERNELS) for name in changed)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    last = int(_git("show", "-s", "--format=%ct"))
    changed = _git("log", f"--since=@{last - _RECENT}", "--name-only", "--format=", "--", "tests", _OF_KERNELS[0])
    print(f"THIRD={third_of(last)}")  # noqa: T201
    print(f"CHANGED='{' '.join(sorted(set(changed.split())))}'")  # noqa: T201


if __name__ == "__main__":
    main()
