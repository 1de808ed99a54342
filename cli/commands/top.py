"""`quire top`: watches the suite on one screen: workers, blocks, hit rate with reasons, queues and slow requests."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Final

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.top.frame import REQUEST_SORTS, WORKER_SORTS, Choice, frame, settled
from cli.top.keys import DOWN, ENTER, UP, pressed
from cli.top.snapshot import Snapshot, taken
from cli.views.why import WhyView
from cli.why.gather import Gatherer
from cli.why.runbook import runbook_at
from common.contracts.errors import FieldViolation, InvalidConfig, QuireError
from router.observe.diagnosis.rules import diagnose

_EVERY_S: Final = 2.0
_BACK: Final = Text("\nany key: back", "dim")


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire top", description=__doc__)
    flags.add_argument(
        "--every", type=float, default=_EVERY_S, metavar="SECONDS", help="seconds between looks (default %(default)g)"
    )
    flags.add_argument("--once", action="store_true", help="print one screen, and end")
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        if not args.every > 0:
            raise InvalidConfig(FieldViolation("--every", f"is {args.every:g}; expected more than 0"))
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            first = await taken(channel)
            if args.json:
                print_json(asdict(first))
            elif args.once or not (console.is_terminal and sys.stdin.isatty()):
                print_frame(console, first)
            else:
                await _Screen(channel, args.admin_address, console, first).run(args.every)

    return run_command(body)


def print_frame(console: Console, snapshot: Snapshot) -> None:
    for line in frame(snapshot, Choice(place=-1), console.width, console.height)[:-1]:
        console.print(line)


class _Screen:
    """The screen of one terminal; keys change what it shows at once, new figures come every few seconds."""

    def __init__(self, channel: grpc.aio.Channel, address: str, console: Console, first: Snapshot) -> None:
        self._channel, self._address, self._console, self._snapshot = channel, address, console, first
        self._choice = settled(first, Choice())
        self._opened: RenderableType | None = None
        self._trouble = ""

    async def run(self, every: float) -> None:
        with pressed() as keys, Live(self._drawn(), console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    async with asyncio.timeout(every):
                        key = await keys.get()
                except TimeoutError:
                    await self._look()
                else:
                    if key == "q":
                        return
                    await self._press(key)
                live.update(self._drawn(), refresh=True)

    async def _look(self) -> None:
        try:
            self._snapshot, self._trouble = await taken(self._channel), ""
            self._choice = settled(self._snapshot, self._choice)
        except grpc.aio.AioRpcError as error:
            self._trouble = f"no answer, these figures are old: {error.details()}"

    async def _press(self, key: str) -> None:
        if self._opened is not None:
            self._opened = None
            return
        choice = self._choice
        if key == "s":
            self._choice = replace(choice, workers=_next(WORKER_SORTS, choice.workers))
        elif key == "r":
            sorted_anew = replace(choice, requests=_next(REQUEST_SORTS, choice.requests))
            self._choice = settled(self._snapshot, sorted_anew)
        elif key in (UP, DOWN):
            self._choice = settled(self._snapshot, choice, 1 if key == DOWN else -1)
        elif key == ENTER and self._snapshot.ended:
            self._opened = await self._why()

    async def _why(self) -> RenderableType:
        try:
            found = diagnose(await Gatherer(self._channel).story(self._choice.selected))
            return Group(WhyView(found, await runbook_at(self._channel, self._address)), _BACK)
        except (QuireError, grpc.aio.AioRpcError) as error:
            return Group(Text(str(error), "yellow"), _BACK)

    def _drawn(self) -> RenderableType:
        if self._opened is not None:
            return self._opened
        snapshot = self._snapshot
        if self._trouble:
            snapshot = replace(snapshot, troubles=(self._trouble, *snapshot.troubles))
        return Group(*frame(snapshot, self._choice, self._console.width, self._console.height))


def _next(names: Iterable[str], name: str) -> str:
    """Return the name after a name; the first after the last."""
    ordered = list(names)
    return ordered[(ordered.index(name) + 1) % len(ordered)]
