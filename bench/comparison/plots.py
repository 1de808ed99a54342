"""Draws a comparison with the peers: throughput, time to first token and inter-token latency, by workload and engine.

    python -m bench.comparison.plots bench/results/peers-*.jsonl

One picture for each type, beside the file of its result lines: a column for each workload and mode, a row for each
figure. Bars are medians over repetitions, with whiskers from least to greatest; times run from the 50th percentile
(dot) to the 99th (ring). Needs matplotlib, which the extra quire-llm[bench] brings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.comparison.peer_process import PEERS
from bench.comparison.ratios import OURS, Lines, Setting, by_engine, median_of, over_fastest
from bench.comparison.table import read_lines
from bench.lib.workloads import TITLES
from cli.plots import ACCENT, GRID, INK, QUIET, STYLE

ORDER: Final = (OURS, "vllm", "openvino", "hf-cb", "naive")
NAMES: Final = {
    OURS: "Quire",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "hf-cb": "transformers, continuous",
    "naive": "transformers, static",
}
_COLOURS: Final = {OURS: ACCENT, "vllm": "#8fa3b8", "openvino": "#a9b8c6", "hf-cb": "#c3cdd6", "naive": "#d9dfe5"}
_ROWS: Final = (("Output tokens a second", ""), ("Time to first token", "ttft"), ("Inter-token latency", "itl"))
_RATIO_FONT: Final[dict[str, Any]] = {"fontsize": 12, "fontweight": "bold", "pad": 8}
_PANEL_WIDTH, _PANEL_HEIGHT = 2.55, 1.75


def draw(lines: Lines, title: str) -> Figure:
    """Return the picture of one type's result lines."""
    settings = by_engine(lines)
    ratios = {each.setting: each.median for each in over_fastest(lines)}
    engines = [name for name in ORDER if any(name in found for found in settings.values())]
    with plt.rc_context(STYLE):
        size = (1.6 + _PANEL_WIDTH * len(settings), 1.1 + _PANEL_HEIGHT * len(_ROWS))
        figure, grid = plt.subplots(len(_ROWS), len(settings), figsize=size, squeeze=False)
        for column, (setting, found) in enumerate(settings.items()):
            for row, (label, kind) in enumerate(_ROWS):
                axes = grid[row][column]
                _prepare(axes, engines, label if column == 0 else "")
                if kind:
                    _latencies(axes, engines, found, kind)
                else:
                    _throughput(axes, engines, found)
                    axes.set_title(_heading(setting), loc="left", fontsize=9, linespacing=1.5, pad=8)
                    if setting in ratios:
                        colour = ACCENT if ratios[setting] >= 1.0 else QUIET
                        axes.set_title(f"{ratios[setting]:.2f}×", loc="right", color=colour, **_RATIO_FONT)
        figure.suptitle(title, x=0.012, y=0.978, ha="left", va="top", fontsize=13, fontweight="bold")
        figure.text(0.012, 0.012, _FOOT, ha="left", va="bottom", fontsize=7.5, color=QUIET)
        figure.tight_layout(rect=(0.0, 0.035, 1.0, 0.985), h_pad=2.0, w_pad=1.6)
    return figure


_FOOT: Final = (
    "Bars: median over repetitions, whiskers from least to greatest. Dots: 50th percentile; rings: 99th, logarithmic. "
    "Quire is measured over gRPC with all its processes; the others are called in process. "
    "Upper right: its throughput over that of the fastest peer."
)


def _heading(setting: Setting) -> str:
    cached = "prefix cache on" if setting.prefix_caching else "prefix cache off"
    return f"{setting.workload} {TITLES[setting.workload]}\n{cached}, x{setting.scale:g}"


def _prepare(axes: Axes, engines: Sequence[str], label: str) -> None:
    axes.set_yticks(range(len(engines)), [NAMES[name] for name in engines] if label else [])
    axes.set_ylim(len(engines) - 0.4, -0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if label:
        axes.set_ylabel(label, fontsize=9, labelpad=8)
        axes.get_yticklabels()[0].set_fontweight("bold")


def _throughput(axes: Axes, engines: Sequence[str], found: dict[str, Any]) -> None:
    most = 0.0
    for place, name in enumerate(engines):
        if name not in found:
            _absent(axes, place, name)
            continue
        values = [float(line["output_tok_s"]) for line in found[name]]
        middle, most = median_of(found[name], "output_tok_s"), max(most, *values)
        axes.barh(place, middle, height=0.62, color=_COLOURS[name])
        if len(values) > 1:
            axes.plot([min(values), max(values)], [place, place], color=INK, linewidth=1.0, alpha=0.65)
        _label(axes, f"{middle:.0f}", (max(values), place), name)
    axes.set_xlim(0, 1.22 * most)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))


def _latencies(axes: Axes, engines: Sequence[str], found: dict[str, Any], kind: str) -> None:
    axes.set_xscale("log")
    seen = []
    for place, name in enumerate(engines):
        if name not in found:
            _absent(axes, place, name)
            continue
        middle, high = (max(0.1, median_of(found[name], f"{kind}_p{q}_ms")) for q in (50, 99))
        seen += [middle, high]
        colour = ACCENT if name == OURS else "#7d8fa1"
        axes.plot([middle, high], [place, place], color=colour, linewidth=1.6, alpha=0.55)
        axes.plot(high, place, "o", markersize=5, markerfacecolor="white", markeredgecolor=colour, markeredgewidth=1.3)
        axes.plot(middle, place, "o", markersize=6, color=colour)
        _label(axes, f"{duration(middle)} \u00b7 {duration(high)}", (high, place), name)
    axes.set_xlim(0.6 * min(seen), 14.0 * max(seen))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: duration(value)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _label(axes: Axes, text: str, where: tuple[float, float], name: str) -> None:
    weight = "bold" if name == OURS else "normal"
    axes.annotate(text, where, (6, 0), textcoords="offset points", va="center", fontsize=7.5, fontweight=weight)


def _absent(axes: Axes, place: int, name: str) -> None:
    why = "not run" if name == OURS or PEERS[name].caches else "no prefix cache"
    axes.annotate(why, (0.02, place), xycoords=("axes fraction", "data"), va="center", color=QUIET, fontsize=7.5)


def duration(milliseconds: float) -> str:
    """Return a duration with two digits or more and its unit: 8.5 ms, 120 ms, 3.4 s, 41 s."""
    value, unit = (milliseconds / 1000, "s") if milliseconds >= 1000 else (milliseconds, "ms")
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("results", nargs="+", type=Path, help="files of result lines")
    flags.add_argument("--title", default="Quire and the engines that one would pick instead")
    args = flags.parse_args()
    mpl.use("agg")
    lines = read_lines(args.results)
    for dtype in dict.fromkeys(line["dtype"] for line in lines):
        figure = draw([line for line in lines if line["dtype"] == dtype], f"{args.title}, {dtype}")
        path = args.results[-1].with_name(f"{args.results[-1].stem}-{dtype}.png")
        figure.savefig(path, dpi=160)
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
