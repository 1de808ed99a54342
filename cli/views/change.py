"""Draws why a measure changed: what happened, what explains it, and a bar for each part of the change.

The hit rate fell from 62 % to 41 %, by 21.0 points: mostly from prefixes that were evicted (16.2 points).

by miss reason                    before       now     change
  prefixes that were evicted         4 %      20 %      -16.2  ━━━━━━━━━━━━━━━━
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from cli.views.cutting import cut
from cli.views.why import advice_line
from router.observe.diagnosis.change import HIT_RATE, Change, Division, Part
from router.observe.diagnosis.change_words import advice_of, caution_of, change_words, head_of, part_name, value_words
from router.observe.diagnosis.words import count, duration

# Parts of one division that have a line; the others share one.
_MOST: Final = 5
_MIN_NAME_WIDTH, _NAME_WIDTH, _MAX_NAME_WIDTH = 12, 24, 40
_FIGURES: Final = 2 + 8 + 2 + 8 + 2 + 9 + 2
_MIN_BAR, _MAX_BAR = 6, 30


class ChangeView:
    """One measure; `seconds` is the length of each span, and `runbook` is where advice is explained."""

    def __init__(self, change: Change, seconds: float, runbook: str) -> None:
        self._change, self._seconds, self._runbook = change, seconds, runbook

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._change
        yield Text(head_of(found), "bold")
        if caution := caution_of(found):
            yield Text(caution, "yellow")
        if (advice := advice_of(found)) is not None:
            yield advice_line(advice, self._runbook)
        yield Text()
        yield self._spans()
        room = _room(found, options.max_width)
        for division in found.divisions:
            yield from self._division(division, options.max_width, room)
        for each in found.missing:
            yield Text.assemble(("missing: ", "yellow"), each)

    def _spans(self) -> Text:
        found, span = self._change, duration(self._seconds)
        counts = f"{count(found.before.requests, 'request')} in the {span} before, {found.after.requests:,} in the last"
        if found.before.p95 is None or found.after.p95 is None:
            return Text(f"{counts} {span}", "dim")
        p50 = f"p50 {duration(found.before.p50 or 0.0)} -> {duration(found.after.p50 or 0.0)}"
        p95 = f"p95 {duration(found.before.p95)} -> {duration(found.after.p95)}"
        return Text(f"{counts} {span}\n{p50}, {p95}", "dim")

    def _division(self, division: Division, width: int, room: int) -> Iterator[Text]:
        parts, missed = _shown(division), self._change.measure == HIT_RATE and division.by == "miss reason"
        bar = max(_MIN_BAR, min(_MAX_BAR, width - room - _FIGURES - 2))
        largest = max((abs(each.change) for each in parts), default=0.0)
        title = "missed tokens" if missed else f"by {division.by}"
        yield Text(f"{title:<{room + 2}}{'before':>10}{'now':>10}{'change':>11}", "bold")
        for part in parts:
            yield self._line(cut(_name(division, part), room), part, room, bar, largest)

    def _line(self, name: str, part: Part, room: int, bar: int, largest: float) -> Text:
        found = self._change
        values = [_value(found, each) for each in (part.before, part.after)]
        sign = "+" if part.change > 0 else "-" if part.change < 0 else " "
        size = f"{sign}{change_words(found, part.change).removesuffix(' points')}"
        line = Text(f"  {name:<{room}}{values[0]:>10}{values[1]:>10}{size:>11}  ")
        filled = round(abs(part.change) / largest * bar) if largest else 0
        good = (part.change > 0) == (found.measure == HIT_RATE)
        return line.append("━" * filled, "green" if good else "red")


_OTHERS: Final = "all others"


def _room(found: Change, width: int) -> int:
    """Return the columns of the names."""
    names = [_name(division, part) for division in found.divisions for part in _shown(division)]
    wanted = max(_NAME_WIDTH, min(_MAX_NAME_WIDTH, max(map(len, names), default=0)))
    return max(_MIN_NAME_WIDTH, min(wanted, width - _FIGURES - _MIN_BAR - 2))


def _name(division: Division, part: Part) -> str:
    return _OTHERS if part.name == _OTHERS else part_name(division, part)


def _shown(division: Division) -> tuple[Part, ...]:
    """Return the parts that have a line: the largest, and one for all others together."""
    if len(division.parts) <= _MOST + 1:
        return division.parts
    rest = division.parts[_MOST:]
    return (*division.parts[:_MOST], Part(_OTHERS, None, None, sum(each.change for each in rest)))


def _value(found: Change, value: float | None) -> str:
    """Return a part's value; of missed tokens, which lower the hit rate, how many there are."""
    return "-" if value is None else value_words(found, abs(value))
