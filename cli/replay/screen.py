"""Draws what a replay came to, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rich.table import Table

from cli.replay.figures import Interval


def _milliseconds(value: float) -> str:
    return f"{1000 * value:,.1f} ms" if value < 10 else f"{value:,.1f} s"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


_LINES: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("ttft_p50_s", "first token, median", _milliseconds),
    ("ttft_p90_s", "first token, 90th percentile", _milliseconds),
    ("ttft_p99_s", "first token, 99th percentile", _milliseconds),
    ("itl_p50_s", "token to token, median", _milliseconds),
    ("itl_p99_s", "token to token, 99th percentile", _milliseconds),
    ("hit_share", "prompt tokens from the cache", _share),
    ("hit_pool_share", "  of them in the pool", _share),
    ("hit_host_share", "  in host memory", _share),
    ("hit_disk_share", "  on disk", _share),
    ("hit_peer_share", "  at another worker", _share),
    ("preemptions", "preemptions", _count),
    ("refused", "refused requests", _count),
    ("tokens_per_s", "output tokens a second", _count),
    ("goodput", "good requests a second", _count),
)


# Columns at most whose intervals are written out.
_WHOLE: Final = 3


def drawn(columns: Mapping[str, Mapping[str, Interval]]) -> Table:
    """Return a line for each figure and a column for each replay; an interval stands where seeds differ.

    Of many columns the interval is half its width, after "±".
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure, words, form in _LINES:
        cells = [_cell(found.get(figure), form, short=len(columns) > _WHOLE) for found in columns.values()]
        if any(cells):
            table.add_row(words, *cells)
    return table


def _cell(found: Interval | None, form: Callable[[float], str], short: bool) -> str:
    if found is None or found.mean != found.mean:
        return ""
    if found.low == found.high:
        return form(found.mean)
    if short:
        return f"{form(found.mean)} ± {form((found.high - found.low) / 2)}"
    return f"{form(found.mean)} ({form(found.low)} to {form(found.high)})"
