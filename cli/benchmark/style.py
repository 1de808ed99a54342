"""Colours and type of the project's plots."""

from __future__ import annotations

from typing import Any, Final

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
