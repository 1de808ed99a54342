"""Draws the rows of a trace: hits and goodput by size of pool, and how many sequences fit. Needs quire-llm[bench].

An .svg keeps its text as text, and equal rows give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.lib.trace_rows import Row
from cli.plots import ACCENT, GRID, INK, QUIET, STYLE
from common.contracts.errors import FieldViolation, InvalidConfig

_STYLE: Final[Any] = STYLE | {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "svg.fonttype": "none",
    "svg.hashsalt": "quire",
    "savefig.facecolor": "white",
}
_BLOCK: Final = 256
# The routing and what the suite has beside its pools, the name, the colour, and how the line is drawn.
_LINES: Final = (
    ("cost", "none", "cost: prefix and load", ACCENT, "-"),
    ("round-robin", "none", "round robin", "#c2701c", "-"),
    ("least-loaded", "none", "least loaded", "#3f5f8a", "-"),
    ("cost", "uncached", "no prefix cache", QUIET, "--"),
    ("cost", "host", "cost, host memory", ACCENT, "--"),
    ("cost", "moves", "cost, host memory and peers", ACCENT, ":"),
)
# What all replays of one picture have in common.
_CONDITIONS: Final = ("requests", "costs", "links", "host_times", "disk_times", "slo_ttft", "slo_itl")
_KINDS: Final = (
    ("reserved", "greatest length reserved", "#c3cdd6"),
    ("buddy", "power of two reserved", "#8fa3b8"),
    ("paged", "blocks of 16", ACCENT),
)


def draw(trace: str, rows: Sequence[Row]) -> Figure:
    """Return the picture of a trace's rows: of what fits, or of replays. Raises InvalidConfig where there are none."""
    mine = [row for row in rows if row["trace"] == trace]
    capacity = [row for row in rows if "reserved" in row]
    with plt.rc_context(_STYLE):
        if capacity:
            return _fitting(capacity)
        if not mine:
            raise InvalidConfig(FieldViolation("--plot", f"no row is of {trace}; replay it first"))
        for name in _CONDITIONS:
            if len({row[name] for row in mine}) > 1:
                what = f"the rows differ by {name}; keep those of each in a file of their own"
                raise InvalidConfig(FieldViolation("--plot", what))
        return _replays(trace, mine)


def _replays(trace: str, rows: Sequence[Row]) -> Figure:
    suites = sorted({(row["workers"], row["load"]) for row in rows})
    size = (max(7.6, 3.0 + 2.6 * len(suites)), 5.4)
    figure, grid = plt.subplots(2, len(suites), figsize=size, squeeze=False, sharex=True)
    for column, (workers, load) in enumerate(suites):
        of_suite = [row for row in rows if (row["workers"], row["load"]) == (workers, load)]
        hits, good = grid[0][column], grid[1][column]
        words = f"{workers} workers" + (f", arrivals {load:g} times as fast" if load != 1.0 else "")
        _prepare(hits, words)
        _prepare(good, "")
        for routing, beside, _, colour, style in _LINES:
            line = [row for row in of_suite if (row["routing"], row["beside"]) == (routing, beside)]
            line.sort(key=lambda row: row["pool"])
            pools = [row["pool"] * _BLOCK for row in line]
            shown: dict[str, Any] = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4}
            if beside != "uncached":
                hits.plot(pools, [100 * row["figures"]["hit_share"] for row in line], **shown)
            good.plot(pools, [row["figures"]["goodput"] / workers for row in line], **shown)
        good.set_xlabel("Tokens in each worker's pool")
    _share_limits(grid[0])
    _share_limits(grid[1])
    grid[0][0].set_ylabel("Hits (% of prompt tokens)")
    grid[1][0].set_ylabel("Good requests/s, a worker")
    known = {(row["routing"], row["beside"]) for row in rows}
    first = rows[0]
    foot = (
        f"Good: first token within {first['slo_ttft']:g} s, others within {1000 * first['slo_itl']:g} ms in the mean. "
        f"A step: {first['costs']}.\nVirtual time; the real router, KV manager and engines decide. One replay a dot."
    )
    _frame(figure, f"{first['requests']:,} requests of {trace}", foot, head=0.7)
    lines: list[tuple[str, str, Any]] = [
        (name, colour, style) for routing, beside, name, colour, style in _LINES if (routing, beside) in known
    ]
    handles = [
        mpl.lines.Line2D([], [], color=colour, linestyle=style, marker="o", markersize=4) for _, colour, style in lines
    ]
    figure.legend(handles, [name for name, _, _ in lines], loc="upper left", bbox_to_anchor=(0.004, 0.945), **_LEGEND)
    return figure


_LEGEND: Final[dict[str, Any]] = {"ncols": 4, "frameon": False, "fontsize": 8.5, "columnspacing": 1.6}


def _fitting(rows: Sequence[Row]) -> Figure:
    ordered = sorted(rows, key=lambda row: (row["trace"], row["slots"], row["reserved"]))
    several = len({row["slots"] for row in ordered}) > 1
    figure, ((left, right),) = plt.subplots(1, 2, figsize=(9.4, 1.7 + 0.62 * len(ordered)), squeeze=False, sharey=True)
    _prepare(left, "Sequences at once, mean")
    _prepare(right, "Slots with a token (% of the memory)")
    for place, row in enumerate(ordered):
        for part, (kind, _, colour) in enumerate(_KINDS):
            at = place + 0.26 * (part - 1)
            _bar(left, at, row["figures"][f"fit_{kind}"], colour)
            _bar(right, at, 100 * row["figures"][f"tokens_{kind}"], colour)
    names = [f"{row['trace']}\nup to {row['reserved']:,} tokens" for row in ordered]
    if several:
        names = [f"{name}, {row['slots']:,} slots" for name, row in zip(names, ordered, strict=True)]
    left.set_yticks(range(len(ordered)), names)
    left.set_ylim(len(ordered) - 0.5, -0.5)
    left.set_xlim(0, 1.16 * max(row["figures"]["fit_paged"] for row in ordered))
    right.set_xlim(0, 112)
    slots = "" if several else f" in {ordered[0]['slots']:,} slots"
    foot = (
        "Requests longer than the greatest length are left out. Others always wait. "
        "The real ledger grants the blocks, and the regions of the greatest length."
    )
    _frame(figure, f"Sequences that fit{slots}", foot)
    patches = [mpl.patches.Patch(color=colour) for _, _, colour in _KINDS]
    where = (0.004, 1 - 0.36 / figure.get_figheight())
    figure.legend(patches, [name for _, name, _ in _KINDS], loc="upper left", bbox_to_anchor=where, **_LEGEND)
    return figure


def _bar(axes: Axes, place: float, value: float, colour: str) -> None:
    axes.barh(place, value, height=0.24, color=colour)
    words = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    axes.annotate(words, (value, place), (4, 0), textcoords="offset points", va="center", color=INK, fontsize=7.5)


def _prepare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=6)
    axes.tick_params(which="both", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def points_of(axes: Axes) -> list[list[tuple[float, float]]]:
    """Return the points of each line that has any."""
    lines: list[Any] = [line.get_xydata() for line in axes.lines]
    return [[(float(x), float(y)) for x, y in line] for line in lines if len(line)]


def _share_limits(panels: Sequence[Axes]) -> None:
    """Give panels that stand side by side one scale, and a tick to each size of pool."""
    points = [point for axes in panels for line in points_of(axes) for point in line]
    top, pools = max((y for _, y in points), default=0.0), sorted({x for x, _ in points})
    for axes in panels:
        axes.set_ylim(0, 1.08 * top or 1.0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(ticker.FixedLocator(pools))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _tokens(value)))


def _tokens(value: float) -> str:
    return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value / 1e3:.3g}k"


def _frame(figure: Figure, title: str, foot: str, head: float = 0.62) -> None:
    height = figure.get_figheight()
    text: dict[str, Any] = {"x": 0.012, "ha": "left"}
    figure.text(y=1 - 0.1 / height, s=title, va="top", fontsize=12, fontweight="bold", **text)
    figure.text(y=0.1 / height, s=foot, va="bottom", fontsize=7.5, color=QUIET, **text)
    figure.tight_layout(rect=(0.0, 0.4 / height, 1.0, 1 - head / height), w_pad=2.0)


def write(trace: str, rows: Sequence[Row], path: Path) -> None:
    """Draw a trace's rows into a file; its suffix is the format, png or svg. Raises InvalidConfig."""
    mpl.use("agg")
    figure = draw(trace, rows)
    with plt.rc_context(_STYLE):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
