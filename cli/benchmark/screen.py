"""Shows a report of `quire bench` in a terminal: figures with bars, limits, comparisons, advice, what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from cli.benchmark.advice import OPTIONS, Advice
from cli.benchmark.limits import Limit
from cli.benchmark.plan import LeftOut
from cli.benchmark.report import Bar, Report, first_token_bars, ratio_bars, speed_bars, unsteadiness
from cli.demo_model import CHECKPOINT

_LEAST_BAR, _MOST_BAR = 8, 40
_MIB: Final = 1 << 20
_UNSTEADY: Final = 0.15
_JUSTIFY: Final[tuple[JustifyMethod, ...]] = ("left", "right", "right", "left")


def number(value: float) -> str:
    """Return a value with about three digits: 1,234 or 56.7 or 0.123."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def bar_of(value: float, most: float, width: int) -> str:
    """Return a bar in half characters; the smallest has one."""
    halves = max(1, round(2 * width * value / most)) if most > 0 else 1
    return "━" * (halves // 2) + "╸" * (halves % 2)


def model_name(report: Report) -> str:
    model = str(report.served["model"])
    if model == str(CHECKPOINT):
        return "the demo model"
    return Path(model).name if Path(model).exists() else model


def described(report: Report) -> str:
    """Return what was served, and on what, in one line."""
    setting, served = report.setting, report.served
    quantised = "" if setting.quantization == "none" else f", {setting.quantization}"
    where = f"{setting.threads} of {setting.cores} cores" if setting.on_cpu else setting.device
    weights = f"{served['weight_bytes'] / _MIB:,.0f} MiB of weights in {served['dtype']}{quantised}"
    return f"{weights}, K and V in {setting.kv_dtype}, blocks of {setting.block_size}; {where}"


def show(report: Report, console: Console) -> None:
    """Print a report; its bars take the width of the console."""
    served = report.served
    console.print(Text.assemble((model_name(report), "bold"), f" on {report.machine['processor']}"))
    console.print(Text(described(report), "dim"))
    how = f"through {served['path']}, " if served["path"] else ""
    memory = f"the worker has {served['worker_rss_mib']:,.0f} MiB"
    console.print(Text(f"{how}up after {served['start_s']:.1f} s; {memory}", "dim"))
    sections: list[tuple[str, RenderableType | None]] = [
        ("Output tokens a second, all streams together", _bars(speed_bars(report), console.width)),
        ("Milliseconds to the first token", _bars(first_token_bars(report), console.width)),
        ("What binds", _limits(report.limits)),
        ("Tokens a second over those of the suite as it is", _bars(ratio_bars(report), console.width, ratios=True)),
        ("Recommended", _advice(report.advice)),
        ("Left out", _left_out(report.left_out)),
    ]
    for title, body in sections:
        if body is not None:
            console.print(Group(Text(f"\n{title}", "bold cyan"), body))
    if unsteadiness(report) > _UNSTEADY:
        words = f"Equal runs differed by {100 * unsteadiness(report):.0f} %: something else uses this machine."
        console.print(Text(f"\n{words} Run it again when the machine is idle.", "yellow"))
    console.print(Text(f"\n{report.seconds:.0f} s in all.", "dim"))


def _table() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _bars(bars: Sequence[Bar], width: int, ratios: bool = False) -> Table | None:
    if not bars:
        return None
    words = _ratio if ratios else number
    rows = [(f"  {bar.name}", words(bar.value), _spread(bar, words)) for bar in bars]
    taken = sum(max(len(row[column]) for row in rows) + 2 for column in range(3))
    room = max(_LEAST_BAR, min(_MOST_BAR, width - taken))
    most = max(bar.value for bar in bars)
    table = _table()
    for justify in _JUSTIFY:
        table.add_column(justify=justify, no_wrap=True)
    for row, bar in zip(rows, bars, strict=True):
        colour = "green" if bar.good else "yellow"
        table.add_row(row[0], Text(row[1], "bold"), Text(row[2], "dim"), Text(bar_of(bar.value, most, room), colour))
    return table


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _spread(bar: Bar, words: Callable[[float], str]) -> str:
    """Return least and greatest; nothing where there is one value."""
    return f"{words(bar.least)} to {words(bar.greatest)}" if bar.least < bar.greatest else ""


def _limits(found: Iterable[Limit]) -> Table:
    table = _table()
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column()
    for each in found:
        mark = Text("binds", "bold red") if each.binds else Text("free", "dim")
        table.add_row(f"  {each.name}", mark, each.words)
    return table


def _advice(found: Sequence[Advice]) -> Table | None:
    if not found:
        return None
    table = _table()
    table.add_column(no_wrap=True)
    table.add_column()
    for each in found:
        words = Text.assemble((f"{each.flags}: ", "bold green"), each.reason) if each.flags else Text(each.reason)
        table.add_row(f"  {OPTIONS[each.option]}", words)
    return table


def _left_out(found: Sequence[LeftOut]) -> Table | None:
    if not found:
        return None
    table = _table()
    table.add_column(no_wrap=True)
    table.add_column()
    for each in found:
        table.add_row(Text(f"  {each.what}", "dim"), Text(each.why, "dim"))
    return table
