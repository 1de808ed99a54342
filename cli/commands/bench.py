"""`quire bench [MODEL]`: what this machine gets with a model, which limits bind, and which options to change.

A suite is started as `quire serve` starts it, on ports of its own, and a client measures it. Then other options are
tried in suites of their own, in turns with the first. Every option of `quire serve` can be given too. Without MODEL:
the demo model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar

from cli.benchmark.measure import Wish, measure
from cli.benchmark.report import as_json
from cli.benchmark.screen import show
from cli.client import path_of, run_command
from cli.demo_model import CHECKPOINT
from cli.plots import plot_problems
from common.contracts.errors import FieldViolation, InvalidConfig
from common.settings.config import refuse

_SECONDS: Final = 150.0
_LEAST_SECONDS, _MOST_SECONDS = 30.0, 3600.0


def parser() -> argparse.ArgumentParser:
    usage = "quire bench [MODEL] [--seconds N] [--figures-only] [--json] [--plot FILE] [options of quire serve]"
    flags = argparse.ArgumentParser("quire bench", usage=usage, description=__doc__, allow_abbrev=False)
    flags.add_argument("--seconds", type=float, default=_SECONDS, help="for everything (default %(default)g)")
    flags.add_argument("--figures-only", action="store_true", help="try no other options")
    flags.add_argument("--json", action="store_true", help="print one object of JSON")
    flags.add_argument("--plot", type=path_of, metavar="FILE", help="also draw the figures, into a .png or .svg")
    return flags


def wish_of(argv: Sequence[str]) -> tuple[argparse.Namespace, Wish]:
    """Return the command's own flags, and what to measure. Raises InvalidConfig with every flag that is wrong."""
    named = bool(argv) and not argv[0].startswith("-")
    args, rest = parser().parse_known_args(argv[1:] if named else argv)
    problems = [*_seconds_problems(args.seconds), *(plot_problems(args.plot) if args.plot else ())]
    if problems:
        raise InvalidConfig(*problems)
    model = argv[0] if named else str(CHECKPOINT)
    return args, Wish(model, tuple(rest), args.seconds, compare=not args.figures_only)


def _seconds_problems(seconds: float) -> Iterator[FieldViolation]:
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        what = f"is {seconds:g}; expected {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
        yield FieldViolation("--seconds", what)


class _TimeBar(ProgressColumn):
    """The time that has passed, of the time that may."""

    def render(self, task: Task) -> ProgressBar:
        return ProgressBar(total=task.total, completed=task.elapsed or 0.0, width=24)


class Stages:
    """Shows on standard error what happens: beside a bar on a terminal, else on a line of its own."""

    def __init__(self, seconds: float, console: Console) -> None:
        self._console, self._began, self._last = console, time.monotonic(), ""
        limit = TextColumn(f"at most {int(seconds) // 60}:{int(seconds) % 60:02d}")
        self._progress = Progress(
            _TimeBar(),
            limit,
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            refresh_per_second=2,  # each refresh takes time from what is measured
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=seconds)

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, what: str, turn: str) -> None:
        self._progress.update(self._task, description=f"{what}, {turn}" if turn else what)
        if not self._console.is_terminal and what != self._last:
            self._console.print(f"{time.monotonic() - self._began:6.1f}s  {what}", soft_wrap=True)
        self._last = what


def main(argv: Sequence[str]) -> int:
    try:
        args, wish = wish_of(argv)
    except InvalidConfig as error:
        refuse(error)

    async def body(console: Console) -> None:
        try:
            with Stages(wish.seconds, Console(stderr=True, highlight=False)) as stages:
                report = await measure(wish, stages)
        except InvalidConfig as error:
            refuse(error)
        if args.json:
            print(json.dumps(as_json(report)))
        else:
            show(report, console)
        if args.plot is not None:
            from cli.benchmark.plot import write

            write(report, args.plot)

    return run_command(body)
