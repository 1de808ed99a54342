"""Draws what replays came to: a panel for each figure, a bar for each replay. Needs matplotlib (quire-llm[bench])."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cli.plots import ACCENT, GRID, INK, QUIET, STYLE
from cli.replay.figures import GOOD_FIRST_TOKEN_S, GOOD_TOKEN_S, Interval

# The figure of each panel, its title, and the factor from the figure to the title's unit.
_PANELS: Final = (
    ("ttft_p50_s", "First token, median (ms)", 1000.0),
    ("ttft_p99_s", "First token, 99th percentile (ms)", 1000.0),
    ("itl_p50_s", "Token to token, median (ms)", 1000.0),
    ("itl_p99_s", "Token to token, 99th percentile (ms)", 1000.0),
    ("hit_share", "Prompt tokens from the cache (%)", 100.0),
    ("preemptions", "Preemptions", 1.0),
    ("goodput", "Goodput (good requests a second)", 1.0),
    ("refused", "Refused requests", 1.0),
)
_ACROSS: Final = 2
_BAR_INCHES, _TITLE_INCHES, _HEAD_INCHES, _FOOT_INCHES = 0.3, 0.75, 0.75, 0.35
# Columns of the table that stand for the suite as it was.
_BEFORE: Final = ("recorded", "replayed")


def draw(columns: Mapping[str, Mapping[str, Interval]], subtitle: str) -> Figure:
    """Return the picture of the columns of a replay's table."""
    rows = math.ceil(len(_PANELS) / _ACROSS)
    height = _HEAD_INCHES + _FOOT_INCHES + rows * (_TITLE_INCHES + _BAR_INCHES * len(columns))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, _ACROSS, figsize=(8.4, height), squeeze=False, sharey=True)
        for axes, (name, title, factor) in zip(grid.flat, _PANELS, strict=True):
            _panel(axes, title, list(columns), [_scaled(found.get(name), factor) for found in columns.values()])
        text: dict[str, Any] = {"x": 0.012, "ha": "left", "va": "top"}
        figure.text(y=1 - 0.1 / height, s="Quire: what if", fontsize=13, fontweight="bold", **text)
        figure.text(y=1 - 0.4 / height, s=subtitle, fontsize=8, color=QUIET, **text)
        figure.text(y=0.2 / height, s=_FOOT, fontsize=7, color=QUIET, **text)
        figure.tight_layout(rect=(0.0, _FOOT_INCHES / height, 1.0, 1 - _HEAD_INCHES / height), h_pad=1.2, w_pad=2.0)
    return figure


_FOOT: Final = (
    "Bars: mean over seeds; whiskers: 95 % interval of the mean, by bootstrap. Good: first token within "
    f"{GOOD_FIRST_TOKEN_S:g} s, and {1000 * GOOD_TOKEN_S:g} ms a token."
)


def _scaled(found: Interval | None, factor: float) -> Interval | None:
    if found is None or math.isnan(found.mean):
        return None
    return Interval(factor * found.mean, factor * found.low, factor * found.high)


def _panel(axes: Axes, title: str, names: Sequence[str], values: Sequence[Interval | None]) -> None:
    for place, (name, found) in enumerate(zip(names, values, strict=True)):
        if found is None:
            axes.annotate("not known", (0, place), (5, 0), textcoords="offset points", va="center", color=QUIET)
            continue
        axes.barh(place, found.mean, color=QUIET if name in _BEFORE else ACCENT, height=0.62)
        if found.high > found.low:
            whisker = [[max(0.0, found.mean - found.low)], [max(0.0, found.high - found.mean)]]
            axes.errorbar(found.mean, place, xerr=whisker, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        where = (max(found.mean, found.high), place)
        axes.annotate(_number(found.mean), where, (5, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    greatest = max((found.high for found in values if found is not None), default=0.0)
    axes.set_xlim(0, 1.2 * greatest or 1.0)
    if not greatest:
        axes.set_xticks([])  # zeros have no scale
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=6)
    axes.tick_params(which="both", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def write(columns: Mapping[str, Mapping[str, Interval]], subtitle: str, path: Path) -> None:
    """Draw the columns into a file; its suffix is the format, png or svg."""
    mpl.use("agg")
    figure = draw(columns, subtitle)
    figure.savefig(path, dpi=160)
    plt.close(figure)
