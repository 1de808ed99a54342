"""Shared parts of the benchmarks: figures as a table and as a line of JSON, medians, bootstrap intervals."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from cli.benchmark.machine import machine

_RESAMPLES = 10_000
_WIDTH = 140


def parser(description: str | None) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--json", action="store_true", help="end with one line of JSON: bench, machine, figures")
    return flags


def median_interval(samples: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by the percentile bootstrap (Efron 1979), 10 000 resamples."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    return statistics.median(samples), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


def report(bench: str, figures: Mapping[str, float], notes: Mapping[str, str], as_json: bool) -> None:
    """Print figures with what each means; and, if asked, the JSON object as the last line."""
    table = Table(box=None, header_style="bold", pad_edge=False, title=f"bench.{bench}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("what it is")
    for name, value in figures.items():
        table.add_row(name, _readable(value), notes.get(name, ""))
    Console(highlight=False, width=_WIDTH).print(table)
    end_with_json(bench, figures, as_json)


def end_with_json(
    bench: str, figures: Mapping[str, float], as_json: bool, words: Mapping[str, object] | None = None
) -> None:
    """Print the JSON object, if asked, as the last line; `words` are results that are not figures."""
    if as_json:
        rounded = {name: round(float(value), 6) for name, value in figures.items()}
        print(json.dumps({"bench": bench, "machine": machine(), "figures": rounded, **(words or {})}))


def report_columns(
    bench: str,
    columns: Mapping[str, Mapping[str, float]],
    notes: Mapping[str, str],
    as_json: bool,
    single: Mapping[str, float] | None = None,
) -> None:
    """Print figures of several columns side by side; `single` are figures without a column.

    In the JSON object a figure of a column is called FIGURE_COLUMN.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, title=f"bench.{bench}", title_justify="left")
    table.add_column("figure")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("what it is")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = (_readable(column[name]) if name in column else "-" for column in columns.values())
        table.add_row(name, *values, notes.get(name, ""))
    for name, value in (single or {}).items():
        table.add_row(name, _readable(value), *[""] * (len(columns) - 1), notes.get(name, ""))
    Console(highlight=False, width=_WIDTH).print(table)
    named = {f"{name}_{column}": value for column, row in columns.items() for name, value in row.items()}
    end_with_json(bench, named | dict(single or {}), as_json)


def progress(text: str, end: bool = False) -> None:
    """Print the progress over the previous message; on a terminal alone. `end` leaves the line."""
    if sys.stderr.isatty():
        print(f"\r{text} ", end="\n" if end else "", file=sys.stderr, flush=True)


def _readable(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) >= 10 else f"{value:.4g}"
