"""Draws the load benchmark's rows: time to first token and goodput against the offered rate, for each count of routers.

python -m bench.open_loop.plot bench/results/load.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.comparison.plots import duration
from cli.plots import ACCENT, GRID, INK, QUIET, STYLE

Row = dict[str, Any]
_COLOURS: Final = {1: ACCENT, 2: "#c2701c", 3: "#3f5f8a"}


def draw(rows: list[Row], title: str) -> Figure:
    """Return the picture of the rows of simulated workers under Poisson arrivals."""
    wanted = [row for row in rows if row["engine"] == "simulated" and row["cv"] == 1.0]
    routers = sorted({int(row["routers"]) for row in wanted})
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, 2, figsize=(10.5, 4.4), squeeze=False)
        first, good = grid[0]
        _prepare(first, "Time to first token", "Output tokens offered a second")
        _prepare(good, "Goodput: requests a second within the SLO", "Output tokens offered a second")
        for count in routers:
            line = sorted((row for row in wanted if row["routers"] == count), key=lambda row: row["offered_tokens_s"])
            _latencies(first, line, count)
            _goodput(good, line, count)
        for axes in (first, good):
            axes.set_xlim(0, 1.08 * max((row["offered_tokens_s"] for row in wanted), default=1.0))
        good.set_ylim(0, 1.15 * max((row["goodput_requests_s"] for row in wanted), default=1.0))
        _offered(good, wanted)
        first.set_yscale("log")
        first.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        first.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: duration(value)))
        first.yaxis.set_minor_formatter(ticker.NullFormatter())
        figure.suptitle(title, x=0.012, y=0.975, ha="left", va="top", fontsize=13, fontweight="bold")
        _name(figure, routers)
        figure.text(0.012, 0.015, _FOOT, ha="left", va="bottom", fontsize=7.5, color=QUIET)
        figure.tight_layout(rect=(0.0, 0.075, 1.0, 0.9), w_pad=2.5)
    return figure


_FOOT: Final = (
    "Left, solid: median; dashed: 99th percentile; from when a request was due. Filled dots: carried, with a steady "
    "backlog and TTFT within the SLO; rings: not carried, or clients that fell behind.\n"
    "Simulated workers, Poisson arrivals; clients, routers, manager and worker share the machine's cores."
)


def _prepare(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
    axes.tick_params(which="both", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _latencies(axes: Axes, line: list[Row], count: int) -> None:
    offered = [row["offered_tokens_s"] for row in line]
    for share, style in ((50, "-"), (99, "--")):
        _points(axes, line, offered, [max(0.1, row[f"ttft_p{share}_ms"]) for row in line], count, style)


def _offered(axes: Axes, rows: list[Row]) -> None:
    """Draw the goodput that the suite would have if every request kept the SLO."""
    top = axes.get_ylim()[1]
    for row in sorted(rows, key=lambda row: row["offered_tokens_s"])[-1:]:
        a_request = row["offered_tokens_s"] / row["offered_requests_s"]
        axes.plot([0, top * a_request], [0, top], ":", color=QUIET, linewidth=1.2)
        where = (0.93 * top * a_request, 0.93 * top)
        axes.annotate("offered", where, (8, -4), textcoords="offset points", color=QUIET)


def _name(figure: Figure, routers: list[int]) -> None:
    """Draw the legend of colours by number of routers, under the title."""
    for place, count in enumerate(routers):
        words = f"{count} router{'s' if count > 1 else ''}"
        at = 0.012 + 0.075 * place
        figure.text(at, 0.895, words, ha="left", va="top", fontsize=9, fontweight="bold", color=_colour(count))


def _goodput(axes: Axes, line: list[Row], count: int) -> None:
    offered = [row["offered_tokens_s"] for row in line]
    values = [row["goodput_requests_s"] for row in line]
    _points(axes, line, offered, values, count, "-")


def _points(axes: Axes, line: list[Row], x: list[float], y: list[float], count: int, style: str) -> None:
    colour = _colour(count)
    axes.plot(x, y, style, color=colour, linewidth=1.5, alpha=0.8)
    for row, across, up in zip(line, x, y, strict=True):
        inside = colour if row["steady"] and row["valid"] else "white"
        axes.plot(across, up, "o", markersize=5, markerfacecolor=inside, markeredgecolor=colour, clip_on=False)


def _colour(count: int) -> str:
    return _COLOURS.get(count, QUIET)


def write(results: Path, title: str = "What routers carry") -> Path:
    """Draw a file of rows beside the file; return the picture's path."""
    mpl.use("agg")
    figure = draw([json.loads(line) for line in results.read_text().splitlines()], title)
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("results", type=Path, help="file of rows, as bench.load writes it")
    flags.add_argument("--title", default="What routers carry")
    args = flags.parse_args()
    print(write(args.results, args.title))


if __name__ == "__main__":
    main()
