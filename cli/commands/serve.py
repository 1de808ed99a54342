"""`quire serve [MODEL]` (or `quire up`): runs a whole suite in the foreground; Ctrl-C drains and stops it.

Options come from flags, QUIRE_* and a TOML file, which the services read too: [serve] is for the suite, [gpuworker] for
each worker, and so on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from cli.suite.preflight import suite_options
from cli.suite.stack import Stack, StackOptions
from common.contracts.errors import InvalidConfig, QuireError
from common.settings.config import REFUSED_STATUS, exit_status, refuse

_COLOURS = {"redis": "red", "kvmanager": "magenta", "router": "cyan"}
KILLED_STATUS = 130

# How the lines begin that processes print, and this command, whatever the level of their logs.
_WELL: Final = ("READY ", "ready", "stopping: ", "stopped")


class Lines:
    """Prints each line of the processes with its time and its process; where it is `quiet`, none of what goes well."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console, self._quiet, self._began = console, quiet, time.monotonic()

    def __call__(self, name: str, line: str) -> None:
        if self._quiet and line.startswith(_WELL):
            return
        text = Text(f"{time.monotonic() - self._began:8.2f}s  ", style="dim")
        text.append(f"{name:<10}", style=_COLOURS.get(name.partition("-")[0], "green"))
        text.append(line)
        self._console.print(text, soft_wrap=True)


class Foreground:
    """A suite that runs until SIGINT or SIGTERM. A second signal kills it."""

    def __init__(self, options: StackOptions, say: Lines) -> None:
        self._options, self._say = options, say
        self._stack = Stack(options, say, shows=True)
        self._stop = asyncio.Event()
        self._killed = False

    @property
    def refused(self) -> bool:
        """Whether a service refused its options."""
        return self._stack.refused

    async def run(self) -> int:
        """Return the exit status. Raises Unavailable when a service cannot run."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopping):
            task.cancel()
        outcome, _ = await asyncio.gather(serving, stopping, return_exceptions=True)
        await self._stack.stop()
        self._say("quire", "stopped")
        if isinstance(outcome, Exception):
            raise outcome
        return KILLED_STATUS if self._killed else 0

    async def _serve(self) -> None:
        stack = self._stack
        await stack.start()
        where = f"gRPC {stack.address}, HTTP {stack.http_url}, admin {stack.admin_address}"
        self._say("quire", f"ready: {where}; Ctrl-C stops")
        await stack.failed.wait()
        raise stack.failure()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._killed = True
            self._say("quire", "killing every process")
            return self._stack.kill()
        self._stop.set()
        patience = f"running requests have {self._options.drain_timeout:g} s"
        self._say("quire", f"stopping: {patience} to finish; Ctrl-C again kills at once")
        return None


def main(argv: Sequence[str]) -> int:
    try:
        options = suite_options(argv, os.environ)
    except InvalidConfig as error:
        refuse(error)
    say = Lines(Console(highlight=False), options.quiet)

    async def body() -> int:
        foreground = Foreground(options, say)
        try:
            return await foreground.run()
        except QuireError as error:
            say("quire", str(error))
            return REFUSED_STATUS if foreground.refused else exit_status(error)

    return asyncio.run(body())
