"""`quire doctor`: checks what `quire serve` needs on this machine, one line each, and says what to do.

The exit status is 1 where `quire serve` would not start, else 0. Options of the environment (QUIRE_...) count.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.client import add_json, command_console, print_json
from cli.config import UpSettings
from cli.doctor.facts import look
from cli.doctor.verdicts import Verdict, judge
from common.settings.config import load_or_exit
from common.version import quire_version

_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


def drawn(verdicts: Sequence[Verdict]) -> Table:
    """Return a line for each verdict; what to do stands below it."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in verdicts:
        table.add_row(Text(each.state, _STYLES[each.state]), Text(each.name), Text(each.found))
        if each.todo:
            table.add_row("", "", Text(each.todo, "yellow"))
    return table


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """Return the last line: whether `quire serve` starts, and whether it could be faster."""
    states = [each.state for each in verdicts]
    if "fail" in states:
        return "quire serve would not start: see the lines with fail."
    if "note" in states:
        return "quire serve starts, and the lines with note say what would serve it better."
    return "quire serve is ready to start."


def show(console: Console, verdicts: Sequence[Verdict]) -> None:
    console.print(Text(f"Quire {quire_version()} on {platform.system()} {platform.machine()}", "bold"))
    console.print(drawn(verdicts))
    console.print(conclusion(verdicts))


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire doctor", description=__doc__, formatter_class=form)
    add_json(flags)
    args = flags.parse_args(argv)
    verdicts = list(judge(look(load_or_exit(UpSettings, (), prog="quire doctor"))))
    ready = all(each.state != "fail" for each in verdicts)
    if args.json:
        print_json({"version": quire_version(), "ready": ready, "checks": [asdict(each) for each in verdicts]})
    else:
        show(command_console(), verdicts)
    return 0 if ready else 1
