"""Draws how well the router predicts: a table of measures, and first tokens as predicted against as they came.

1,204 requests: what the router predicted, against what happened

                predicted    actual     error   off p50   off p90 within 2x
prefill             31 ms     38 ms   -6.8 ms    7.1 ms     19 ms      93 %
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from router.observe.diagnosis.calibration import Calibration, Measure, Pair, Predicted
from router.observe.diagnosis.words import count, duration, percent

_NAMES: Final = {
    Measure.WAIT: "wait at worker",
    Measure.FETCH: "fetch",
    Measure.HITS: "cached tokens",
    Measure.PREFILL: "prefill",
    Measure.FIRST_TOKEN: "first token",
}
_HEADS: Final = ("predicted", "actual", "error", "off p50", "off p90", "within 2x")
_NAME_WIDTH, _WIDTH = 15, 10
_ROWS: Final = 16
# What stands before the plot's frame, and the widest plot.
_MARGIN, _MOST_COLUMNS = 9, 100
# Requests in one cell of the plot, from few to many.
_MARKS: Final = ((1, "·"), (3, "∘"), (10, "●"))
_LEAST_S: Final = 1e-4


class CalibrationView:
    def __init__(self, found: Sequence[Calibration], requests: Sequence[Predicted], missing: Sequence[str]) -> None:
        self._found, self._requests, self._missing = found, requests, missing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{count(len(self._requests), 'request')}: what the router predicted, against what happened", "bold")
        yield Text()
        yield Text(" " * _NAME_WIDTH + "".join(f"{each:>{_WIDTH}}" for each in _HEADS), "dim")
        for each in self._found:
            yield _row(each)
        yield Text("medians; error: too much (+) or too little (-) predicted; off: its size", "dim")
        pairs = [each.pairs[Measure.FIRST_TOKEN] for each in self._requests if Measure.FIRST_TOKEN in each.pairs]
        if pairs:
            yield Text()
            yield from plot(pairs, options.max_width)
        for words in self._missing:
            yield Text.assemble(("missing: ", "yellow"), words)


def _row(each: Calibration) -> Text:
    values = [each.predicted_p50, each.actual_p50, each.error_p50, each.off_p50, each.off_p90]
    if each.measure is Measure.HITS:
        cells = [f"{value:+,.0f}" if place == 2 else f"{value:,.0f}" for place, value in enumerate(values)]
    else:
        cells = [_signed(value) if place == 2 else duration(value) for place, value in enumerate(values)]
    shown = (*cells, percent(each.near))
    return Text(f"{_NAMES[each.measure]:<{_NAME_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in shown))


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def plot(pairs: Sequence[Pair], width: int) -> Iterator[Text]:
    """Yield the lines of a plot with logarithmic axes; points on the diagonal came as predicted."""
    columns = max(20, min(width - _MARGIN - 2, _MOST_COLUMNS))
    values = [max(_LEAST_S, value) for each in pairs for value in (each.predicted, each.actual)]
    low, high = _decades(min(values), max(values))

    def place(value: float, cells: int) -> int:
        share = (math.log10(max(_LEAST_S, value)) - low) / (high - low)
        return min(cells - 1, max(0, int(share * cells)))

    counts: dict[tuple[int, int], int] = {}
    for each in pairs:
        cell = place(each.actual, _ROWS), place(each.predicted, columns)
        counts[cell] = counts.get(cell, 0) + 1
    yield Text("first token: actual (up) against predicted (right)", "bold")
    for row in reversed(range(_ROWS)):
        line = Text(_edge(row, low, high), "dim")
        line.append("┤" if _is_decade(row, low, high) else "│", "dim")
        for column in range(columns):
            number = counts.get((row, column), 0)
            diagonal = row == column * _ROWS // columns
            line.append(_mark(number) if number else "╱" if diagonal else " ", "cyan" if number else "dim")
        yield line
    yield Text(" " * _MARGIN + "└" + "─" * columns, "dim")
    yield Text(" " * _MARGIN + " " + _bottom(low, high, columns), "dim")
    yield Text(" " * _MARGIN + " · 1 or 2 requests   ∘ 3 to 9   ● 10 or more   ╱ as predicted", "dim")


def _decades(least: float, most: float) -> tuple[int, int]:
    """Return the powers of ten between which all values are."""
    low = math.floor(math.log10(least))
    return low, max(low + 1, math.ceil(math.log10(most)))


def _mark(number: int) -> str:
    return next(mark for least, mark in reversed(_MARKS) if number >= least)


def _is_decade(row: int, low: int, high: int) -> bool:
    return any(row == _row_of(each, low, high) for each in range(low, high + 1))


def _row_of(decade: int, low: int, high: int) -> int:
    return min(_ROWS - 1, (decade - low) * _ROWS // (high - low))


def _edge(row: int, low: int, high: int) -> str:
    """Return what stands before a row: the time of a power of ten, or nothing."""
    found = next((each for each in range(low, high + 1) if row == _row_of(each, low, high)), None)
    return " " * _MARGIN if found is None else f"{_time(found):>{_MARGIN - 1}} "


def _bottom(low: int, high: int, columns: int) -> str:
    line = ""
    for each in range(low, high + 1):
        words = _time(each)
        at = (each - low) * columns // (high - low)
        line = line.ljust(min(at, columns - len(words))) + words
    return line


def _time(decade: int) -> str:
    return f"{10**decade:,} s" if decade >= 0 else f"{10.0 ** (decade + 3):g} ms"
