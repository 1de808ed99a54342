"""The tables of a comparison with the peers: throughput and ratio by workload, memory and start by engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.comparison.ratios import OURS, SHORT, Lines, by_engine, median_of, over_fastest, ratio_figures
from bench.lib.harness import end_with_json, parser

_WIDTH = 150


def throughput_table(lines: Lines) -> Table:
    """Return output tokens a second of each engine in each setting, and Quire over the fastest peer."""
    settings = by_engine(lines)
    names = _engines(lines)
    table = _table("Output tokens a second: median (least to greatest)")
    for heading in ("workload", "scale", *names, "ours over the fastest peer"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    ratios = {each.setting: each for each in over_fastest(lines)}
    for setting, engines in settings.items():
        cells = [_spread(engines[name], "output_tok_s") if name in engines else "-" for name in names]
        verdict = "-"
        if (found := ratios.get(setting)) is not None:
            verdict = f"{found.median:.2f} ({found.least:.2f} to {found.greatest:.2f}) {found.peer}"
        table.add_row(setting.name, f"x{setting.scale:g}", *cells, verdict)
    return table


def latency_table(lines: Lines) -> Table:
    """Return times to first token and inter-token latencies: 50th and 99th percentile, medians over repetitions."""
    names = _engines(lines)
    table = _table("Time to first token; inter-token latency: 50th / 99th percentile, ms")
    for heading in ("workload", *names):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for setting, engines in by_engine(lines).items():
        table.add_row(setting.name, *(_latency(engines[name]) if name in engines else "-" for name in names))
    return table


def engine_table(lines: Lines) -> Table:
    """Return start time and memory of each engine, and the share of its tokens that agree with Quire's."""
    table = _table("Engines")
    headings = ("engine", "start, s", "peak RSS, MiB", "same tokens as ours")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for name, found in _by_mode(lines).items():
        start, memory = (max(float(line[figure]) for line in found) for figure in ("start_s", "peak_rss_mib"))
        table.add_row(name, f"{start:.1f}", f"{memory:.0f}", f"{100 * float(found[0]['agreement']):.2f} %")
    return table


def all_figures(lines: Lines) -> dict[str, float]:
    figures = ratio_figures(lines)
    for setting, engines in by_engine(lines).items():
        for name, found in engines.items():
            figures[f"tok_s_{setting.name}_{name}"] = median_of(found, "output_tok_s")
    for name, found in _by_mode(lines).items():
        key = name.replace(", ", "_").replace(" ", "_")
        figures[f"peak_rss_mib_{key}"] = max(float(line["peak_rss_mib"]) for line in found)
        figures[f"start_s_{key}"] = max(float(line["start_s"]) for line in found)
        figures[f"agreement_{key}"] = float(found[0]["agreement"])
    return figures


def print_report(lines: Lines, files: Sequence[Path], as_json: bool) -> None:
    """Print the tables; and, if asked, the JSON object as the last line."""
    print_tables(lines, files)
    end_with_json("peers", all_figures(lines), as_json)


def print_tables(lines: Lines, files: Sequence[Path]) -> None:
    console = Console(highlight=False, width=_WIDTH)
    for table in (throughput_table(lines), latency_table(lines), engine_table(lines)):
        console.print(table)
    console.print(f"result lines: {', '.join(map(str, files))}", soft_wrap=True)


def _table(title: str) -> Table:
    return Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left")


def _engines(lines: Lines) -> list[str]:
    names = dict.fromkeys(str(line["engine"]) for line in lines)
    return sorted(names, key=lambda name: name != OURS)


def _by_mode(lines: Lines) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        cached = ", cached" if line["prefix_caching"] == "on" else ""
        found.setdefault(f"{line['engine']}, {SHORT[line['dtype']]}{cached}", []).append(line)
    return found


def _spread(lines: Lines, figure: str) -> str:
    values = [float(line[figure]) for line in lines]
    return f"{median_of(lines, figure):.0f} ({min(values):.0f} to {max(values):.0f})"


def _latency(lines: Lines) -> str:
    first, gap = ([median_of(lines, f"{kind}_p{q}_ms") for q in (50, 99)] for kind in ("ttft", "itl"))
    return f"{first[0]:.0f} / {first[1]:.0f}; {gap[0]:.1f} / {gap[1]:.1f}"


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("results", nargs="+", type=Path, help="files of result lines")
    args = flags.parse_args()
    print_report(read_lines(args.results), args.results, args.json)


if __name__ == "__main__":
    main()
