"""The command of a Python child process. `-P` keeps files and packages of the current folder out of its imports."""

from __future__ import annotations

import sys


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module as a program, with these arguments."""
    return [sys.executable, "-P", "-m", module, *words]
