"""Draws a diagnosis on one screen: the verdict, what to do, a bar for each phase, and each decision in a sentence.

    94 % of the 1.9 s to the first token: it waited at worker-0 for 8 blocks, and 3 sequences of tenant blue ...
    0 of 100 prompt tokens were cached: ...
    What to do: ...

Bars are green for work on the request, red for waits, and yellow where the cause is not known.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from cli.views.cutting import cut
from router.observe.diagnosis.causes import Advice, Cause
from router.observe.diagnosis.phases import LABELS, WORK
from router.observe.diagnosis.session_requests import SessionRequest
from router.observe.diagnosis.verdict import Diagnosis, PhaseSpan, advised
from router.observe.diagnosis.words import duration, percent

_MIN_BAR, _MAX_BAR = 10, 60
_OFFSET_WIDTH = 9
# Of the id in a table of requests; what the other columns take before the id takes more.
_LEAST_ID, _WIDE = 18, 90


class WhyView:
    """One request; `runbook` is where advice is explained."""

    def __init__(self, diagnosis: Diagnosis, runbook: str) -> None:
        self._diagnosis, self._runbook = diagnosis, runbook

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._diagnosis
        yield from head_lines(found, self._runbook)
        yield Text()
        yield self._heading()
        if found.phases:
            yield from self._bars(options.max_width)
        for step in found.steps:
            at = f"{duration(step.offset) if step.offset > 0 else '0':>{_OFFSET_WIDTH}}"
            yield _hanging(f"{at}  {step.service:<9}  ", step.sentence, options.max_width)
        for each in found.missing:
            yield Text.assemble(("not known: ", "yellow"), each)

    def _heading(self) -> Text:
        found = self._diagnosis
        heading = Text.assemble(("request ", "dim"), (found.request_id, "bold"))
        if found.tenant:
            heading.append(f"  tenant {found.tenant}", "dim")
        if found.total_s is not None:
            heading.append(f"  took {duration(found.total_s)}", "dim")
        if found.first_token_s is not None:
            heading.append(f", the first token {duration(found.first_token_s)}", "dim")
        return heading

    def _bars(self, width: int) -> Iterator[Text]:
        labels = [LABELS[each.phase] for each in self._diagnosis.phases]
        names = max(map(len, labels))
        bar = max(_MIN_BAR, min(_MAX_BAR, width - names - 24))
        for label, each in zip(labels, self._diagnosis.phases, strict=True):
            line = Text.assemble(("  " + label.ljust(names), "dim" if each.share < 0.01 else ""), "  ")
            line.append(f"{duration(each.seconds):>8}  {percent(each.share):>10}  ")
            yield line.append("━" * max(1, round(each.share * bar)), _colour(each))


class WhyTable:
    """Several requests, a line each."""

    def __init__(self, found: Sequence[Diagnosis], more: int) -> None:
        self._found, self._more = found, more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False, header_style="bold")
        longest = max((len(each.request_id) for each in self._found), default=0)
        # The first characters name a request. A program that reads the table gets the whole id.
        room = max(_LEAST_ID, options.max_width - _WIDE) if console.is_terminal else longest
        table.add_column("request", no_wrap=True)
        table.add_column("first token", justify="right", no_wrap=True)
        table.add_column("took", justify="right", no_wrap=True)
        table.add_column("why")
        for each in self._found:
            times = (duration(s) if s is not None else "-" for s in (each.first_token_s, each.total_s))
            table.add_row(Text(cut(each.request_id, room)), *times, Text(_why(each)))
        yield table
        if self._more:
            yield Text(f"and {self._more} more; name one request for all about it", "dim")


class SessionTable:
    """The requests of one session, a line each, in the order in which they came; `earlier` ones are left out."""

    def __init__(self, requests: Sequence[SessionRequest], earlier: int) -> None:
        self._requests, self._earlier = requests, earlier

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._earlier:
            yield Text(f"{self._earlier} earlier requests are left out; --since TIME chooses a span", "dim")
        table = Table(box=None, pad_edge=False, header_style="bold")
        room = _LEAST_ID if console.is_terminal else max((len(each.request_id) for each in self._requests), default=0)
        table.add_column("came", no_wrap=True)
        table.add_column("request", no_wrap=True)
        for name in ("think time", "waited", "first token", "took", "hits"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("why")
        for each in self._requests:
            came = datetime.fromtimestamp(each.began_ns / 1e9).astimezone().strftime("%H:%M:%S")
            why = "" if each.diagnosis is None else _why(each.diagnosis)
            table.add_row(came, Text(cut(each.request_id, room)), *_figures_of(each), Text(why))
        yield table


def _figures_of(request: SessionRequest) -> Iterator[str]:
    """Yield think time, wait, time to the first token, time in all, and cached tokens of prompt tokens."""
    yield duration(request.think_s) if request.think_s is not None else "-"
    if (outcome := request.outcome) is None:
        yield from ("-",) * 4
        return
    yield duration(request.waited_s)
    yield duration(outcome.first_token_s) if outcome.has_first_token else "-"
    yield duration(outcome.total_s)
    yield f"{outcome.cached_tokens} of {outcome.prompt_tokens}" if outcome.prompt_tokens else "-"


def _why(found: Diagnosis) -> str:
    return found.verdict.sentence if found.prefix is None else f"{found.verdict.sentence} {found.prefix.sentence}"


def head_lines(found: Diagnosis, runbook: str) -> Iterator[Text]:
    """Yield the verdict, why no more was cached, and what to do about both."""
    yield Text(found.verdict.sentence, "bold yellow" if found.verdict.cause is Cause.NOT_KNOWN else "bold")
    if found.prefix is not None:
        yield Text(found.prefix.sentence)
    for each in advised(found):
        yield advice_line(each.advice, runbook)


def advice_line(advice: Advice, runbook: str) -> Text:
    """Return what to do, and where the runbook says more."""
    return Text.assemble(("What to do: ", "green"), advice.text, (f" {advice.link(runbook)}", "dim"))


def _colour(each: PhaseSpan) -> str:
    if each.cause is Cause.NOT_KNOWN:
        return "yellow"
    return "green" if each.phase in WORK else "red"


def _hanging(lead: str, text: str, width: int) -> Text:
    """Return a line whose continuations stand under its text."""
    lines = textwrap.wrap(text, max(20, width - len(lead))) or [""]
    return Text.assemble((lead, "dim"), ("\n" + " " * len(lead)).join(lines))
