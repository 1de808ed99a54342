"""Draws a report of `quire bench`: speeds, times to the first token, alternatives. Needs quire-llm[bench]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cli.benchmark.report import Bar, Report, first_token_bars, ratio_bars, speed_bars
from cli.benchmark.screen import described, model_name, number
from cli.plots import ACCENT, GRID, INK, QUIET, STYLE

_BAR_INCHES, _HEAD_INCHES, _FOOT_INCHES = 0.36, 0.7, 0.3
_FOOT: Final = "Bars: median; whiskers: least to greatest. A client measures the suite: router, KV manager, worker."


def draw(report: Report) -> Figure:
    """Return the picture: a panel for each kind of figure that was measured."""
    panels = [
        ("Output tokens a second, all streams together", speed_bars(report), False),
        ("Milliseconds to the first token", first_token_bars(report), False),
        ("Tokens a second over those of the suite as it is", ratio_bars(report), True),
    ]
    shown = [panel for panel in panels if panel[1]]
    heights = [1.6 + len(bars) for _, bars, _ in shown]
    with plt.rc_context(STYLE):
        size = (7.6, _HEAD_INCHES + _FOOT_INCHES + _BAR_INCHES * sum(heights))
        figure, grid = plt.subplots(len(shown), 1, figsize=size, squeeze=False, height_ratios=heights)
        for axes, (title, bars, ratios) in zip(grid[:, 0], shown, strict=True):
            _panel(axes, title, bars, ratios)
        _text(figure, size[1] - 0.1, f"Quire: {model_name(report)}", fontsize=13, fontweight="bold")
        _text(figure, size[1] - 0.4, described(report), fontsize=8, color=QUIET)
        _text(figure, 0.2, f"{report.machine['processor']}. {_FOOT}", fontsize=7, color=QUIET)
        figure.tight_layout(rect=(0.0, _FOOT_INCHES / size[1], 1.0, 1 - _HEAD_INCHES / size[1]), h_pad=1.4)
    return figure


def _text(figure: Figure, inches: float, words: str, **style: Any) -> None:
    """Write a line whose top is at this height."""
    figure.text(0.012, inches / figure.get_figheight(), words, ha="left", va="top", **style)


def _panel(axes: Axes, title: str, bars: Sequence[Bar], ratios: bool) -> None:
    places = range(len(bars))
    colours = [ACCENT if bar.good else QUIET for bar in bars]
    whiskers = [[bar.value - bar.least for bar in bars], [bar.greatest - bar.value for bar in bars]]
    axes.barh(places, [bar.value for bar in bars], color=colours, height=0.62)
    axes.errorbar([bar.value for bar in bars], places, xerr=whiskers, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    for place, bar in zip(places, bars, strict=True):
        text = f"{bar.value:.2f}" if ratios else number(bar.value)
        axes.annotate(text, (bar.greatest, place), (5, 0), textcoords="offset points", va="center", color=INK)
    if ratios:
        axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max(bar.greatest for bar in bars))
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=6)
    axes.tick_params(which="both", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def write(report: Report, path: Path) -> None:
    """Draw a report into a file; its suffix is the format, png or svg."""
    mpl.use("agg")
    figure = draw(report)
    figure.savefig(path, dpi=160)
    plt.close(figure)
