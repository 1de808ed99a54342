"""The screen of `quire status --watch`, and its keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.views.why import WhyView
from cli.watch.frame import REQUEST_SORTS, WORKER_SORTS, Choice, frame, settled
from cli.watch.keys import DOWN, ENTER, UP, pressed
from cli.watch.snapshot import Snapshot, taken
from cli.why.gather import Gatherer
from cli.why.runbook import runbook_at
from common.contracts.errors import QuireError
from router.observe.diagnosis.rules import diagnose

_BACK: Final = Text("\nany key: back", "dim")


def print_frame(console: Console, snapshot: Snapshot) -> None:
    for line in frame(snapshot, Choice(place=-1), console.width, console.height)[:-1]:
        console.print(line)


class Screen:
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
            found = diagnose(await Gatherer(self._channel).history(self._choice.selected))
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
