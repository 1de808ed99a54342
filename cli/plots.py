"""Colours and type of the project's plots, and what keeps a command from drawing one (matplotlib: quire-llm[bench])."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from common.contracts.errors import FieldViolation

_FORMATS: Final = (".png", ".svg")

ACCENT, INK, QUIET, GRID = "#0b6e4f", "#22262b", "#6b7280", "#e5e7eb"
STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": INK,
}


def plot_problems(path: Path) -> Iterator[FieldViolation]:
    """Yield what is wrong with the file of a `--plot`, so that it is said before anything is measured."""
    if path.suffix not in _FORMATS:
        yield FieldViolation("--plot", f"is {path}; expected a file that ends with {' or '.join(_FORMATS)}")
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        yield FieldViolation("--plot", f"{path} cannot be written; expected a file in a folder that is there")
    if importlib.util.find_spec("matplotlib") is None:
        yield FieldViolation("--plot", "needs matplotlib, which is not installed; install quire-llm[bench]")
